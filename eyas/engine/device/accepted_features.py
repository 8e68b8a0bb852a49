"""Features of accepted rows for a drafter elsewhere: some stay on the device, others come to the host."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import torch

from eyas.engine.batch.sequence import SequenceWork
from eyas.engine.batch.step_result import StepResult
from eyas.engine.batch.window import ROWS, DeviceFeatures, DeviceRows
from eyas.engine.device.step import FeatureRequest, PlacedBatch, StepShape


class DeviceResident(NamedTuple):
    """Features that stay on the device, of the sequence in `slot`. `generation`: as `StepResult.ringed`."""

    keeper: DeviceFeatures
    slot: int
    generation: int

    def of(self, one: StepResult) -> StepResult:
        """A copy of the result with its features."""
        work = one.work
        rows = range(work.start, work.start + one.rows)
        return one._replace(
            features=DeviceRows(self.keeper, self.slot, work.occupancy, rows), ringed=self.generation
        )


@dataclass(frozen=True)
class AcceptedFeatures:
    """Features for a drafter elsewhere: float32 [n, head width], valid once the step has landed.

    `path_rows` rows for each round that comes to the host, those of its path and others behind them; then one
    for each such single; then, in order, `chunks[i]` rows for the end of chunk i. `stay`: of rounds and
    singles; None: its features come to the host. `rows`: None: nothing does.
    """

    rows: torch.Tensor | None
    path_rows: int
    chunks: SequenceOf[int]
    stay: SequenceOf[DeviceResident | None]

    def of(self, landed: SequenceOf[StepResult], rounds: int) -> list[StepResult]:
        """`landed`, chunks first, then as many rounds, then singles, with their features."""
        first, decoded = 0, []
        for i, (one, resident) in enumerate(zip(landed[len(self.chunks) :], self.stay, strict=True)):
            if resident is not None:
                decoded.append(resident.of(one))
            else:
                decoded.append(one._replace(features=self._rows(first, one.rows)))
                first += self.path_rows if i < rounds else 1
        results = []
        for one, count in zip(landed, self.chunks, strict=False):
            results.append(one._replace(features=self._rows(first, count) if count else None))
            first += count
        return results + decoded

    def _rows(self, first: int, count: int) -> torch.Tensor:
        assert self.rows is not None
        return self.rows[first : first + count]


def chunk_ends(chunks: SequenceOf[SequenceWork]) -> list[int]:
    """Counts the rows at the end of each chunk whose features a drafter may need."""
    return [
        max(0, min(len(work.tokens), work.start + len(work.tokens) + ROWS - len(work.seq)))
        if work.seq.generation.request.speculative
        else 0
        for work in chunks
    ]


def staying(placed: PlacedBatch, keeper: DeviceFeatures | None) -> list[DeviceResident | None]:
    """Marks the rounds, then the singles, whose features stay on the device. `keeper`: None: the device keeps
    nothing.

    Those of a sequence whose drafter takes features by the host come there.
    """
    residents: list[DeviceResident | None] = []
    for work in (*placed.rounds, *placed.singles):
        seq = work.seq
        if keeper is None or (seq.drafting and seq.ring is None):
            residents.append(None)
        else:
            residents.append(DeviceResident(keeper, seq.slot, 0 if seq.ring is None else seq.ring.generation))
    return residents


def feature_request(
    placed: PlacedBatch,
    shape: StepShape,
    path_rows: int,
    ends: SequenceOf[int],
    stay: SequenceOf[DeviceResident | None],
) -> FeatureRequest | None:
    """The features to copy to the host; None: none. `ends`: as of `chunk_ends`, `stay` as of `staying`."""
    decoded: list[int] = []
    for i, resident in enumerate(stay):
        if resident is None and i < len(placed.rounds):
            decoded += range(i * path_rows, (i + 1) * path_rows)
        elif resident is None:
            decoded.append(shape.batch * path_rows + i - len(placed.rounds))
    rows: list[int] = []
    end = shape.round_rows
    for work, count in zip(placed.chunks, ends, strict=True):
        end += len(work.tokens)
        rows += range(end - count, end)
    return FeatureRequest(decoded, rows) if decoded or rows else None
