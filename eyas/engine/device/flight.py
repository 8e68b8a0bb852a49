"""A device's step between its launch and its landing: what was launched for whom, and what came of it.

Features of accepted rows are for a drafter elsewhere: some stay on the device, others come to the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from eyas.engine.batch.prompt_scores import ScoreRequest
from eyas.engine.batch.sequence import SequenceWork
from eyas.engine.batch.step_result import NOT_FINITE, StepResult
from eyas.engine.batch.tree import DraftCounts
from eyas.engine.batch.window import ROWS, DeviceFeatures, DeviceRows
from eyas.engine.device.executor import DeviceEvent
from eyas.engine.device.special import SpecialReport
from eyas.engine.device.step import FeatureRequest, PlacedBatch, StepShape
from eyas.engine.sampling.scores import TokenScores


@dataclass(frozen=True)
class ScoredPrompt:
    """Prompt rows of `work` that were asked for; `scores` are valid once the step has landed."""

    work: SequenceWork
    request: ScoreRequest
    scores: TokenScores


@dataclass(frozen=True)
class PromptFeatures:
    """Float32 [len(works), head width], of the last row of each; valid once the step has landed."""

    works: SequenceOf[SequenceWork]
    rows: torch.Tensor

    def by_work(self) -> dict[int, torch.Tensor]:
        """The feature row of each work, by the work's `id`."""
        return {id(work): row[None] for work, row in zip(self.works, self.rows, strict=True)}


@dataclass(frozen=True)
class RankPart:
    """An attention rank's part of a step. `placed`: its works in the order of their rows."""

    placed: PlacedBatch
    scored: SequenceOf[ScoredPrompt] = ()
    features: PromptFeatures | None = None


@dataclass(frozen=True)
class StepOutput:
    """`words`: int32 [ranks, n] on the host. All is valid once `event` (None on a CPU) has passed.

    `special`: of each rank. `certain`: of the only one.
    """

    words: torch.Tensor
    event: DeviceEvent | None
    special: SequenceOf[SpecialReport]
    certain: AcceptedFeatures | None = None


@dataclass
class LaunchedStep:
    """`parts`: of each rank; they end together. `finish` launches what follows the forward, once.
    `launched`: monotonic seconds.
    """

    shape: StepShape
    works: SequenceOf[SequenceWork]
    parts: SequenceOf[RankPart]
    finish: Callable[[], StepOutput]
    depth: int | None = None
    launched: float = field(default_factory=time.monotonic)
    _results: StepOutput | None = field(default=None, init=False)

    @property
    def over(self) -> bool:
        """True if the device has done it; does not wait."""
        if self._results is None:
            return False
        return self._results.event is None or self._results.event.query()

    def complete(self) -> None:
        """Launches what follows the forward, if that is not done."""
        if self._results is None:
            self._results = self.finish()

    def land(self) -> list[StepResult]:
        """Waits for the devices; rank after rank, the chunks of each first."""
        assert self._results is not None, "complete first"
        results = self._results
        if results.event is not None:
            results.event.synchronize()
        landed: list[StepResult] = []
        for part, words, special in zip(self.parts, results.words.numpy(), results.special, strict=True):
            landed += self._landed(part, words, special)
        if results.certain is None:
            return landed
        return results.certain.of(landed, len(self.parts[0].placed.rounds))

    def _landed(self, part: RankPart, words: np.ndarray, special: SpecialReport) -> list[StepResult]:
        """`words`: as `StepShape.result_ends` says.

        The chunks come first here: first tokens are delivered before the next tokens of running sequences.
        """
        shape, placed = self.shape, part.placed
        rounds, singles, ends = shape.result_ends
        landed = self._prompts(part, words[singles:ends].tolist(), special)
        table, walked = _rows(words[:rounds], shape.batch), _rows(words[ends:], shape.batch)
        for i, (work, row, path) in enumerate(zip(placed.rounds, table, walked, strict=False)):
            count, depth, nodes, *tokens = row
            if depth < 0:
                depth, tokens[count - 1] = NOT_FINITE - depth, NOT_FINITE
            place, drafts = i * shape.width, DraftCounts(count - 1, depth, nodes)
            logprobs, forks = special.logprobs(place, path[:count]), special.firsts(place)
            landed.append(StepResult(work, tuple(tokens[:count]), logprobs, drafts, forks))
        first = shape.batch * shape.width
        alone = _rows(words[rounds:singles], shape.singles)
        for place, (work, row) in enumerate(zip(placed.singles, alone, strict=False), start=first):
            logprobs, forks = special.logprobs(place, (0,)), special.firsts(place)
            token = row[-1] if row[1] >= 0 else NOT_FINITE
            landed.append(StepResult(work, (token,), logprobs, forks=forks))
        return landed

    def _prompts(self, part: RankPart, tokens: list[int], special: SpecialReport) -> list[StepResult]:
        """`tokens`: the first token of each chunk that ends its prompt, in order."""
        results, end = [], 0
        for work in part.placed.chunks:
            if work.sample:
                place = self.shape.round_rows + end
                logprobs, forks = special.logprobs(place, (0,)), special.firsts(place)
                results.append(StepResult(work, (tokens[end],), logprobs, forks=forks))
                end += 1
            else:
                results.append(StepResult(work))
        scores = {id(one.work): (one.request, one.scores.packed()) for one in part.scored}
        features = {} if part.features is None else part.features.by_work()
        if not scores and not features:
            return results
        return [
            one._replace(scores=scores.get(id(one.work)), features=features.get(id(one.work)))
            for one in results
        ]


def _rows(words: np.ndarray, count: int) -> list[list[int]]:
    """Cuts `count` rows of equal length."""
    return words.reshape(count, -1).tolist() if count else []


class DeviceResident(NamedTuple):
    """Features that stay on the device, of the sequence in `slot`. `generation`: as `StepResult.ringed`.
    `last`: of how many rows, those at a prompt's end; 0: of all.
    """

    keeper: DeviceFeatures
    slot: int
    generation: int
    last: int = 0

    def of(self, one: StepResult) -> StepResult:
        """A copy of the result with its features."""
        work, end = one.work, one.work.start + one.rows
        rows = range(end - (self.last or one.rows), end)
        return one._replace(
            features=DeviceRows(self.keeper, self.slot, work.occupancy, rows), ringed=self.generation
        )


@dataclass(frozen=True)
class AcceptedFeatures:
    """Features for a drafter elsewhere: float32 [n, head width], valid once the step has landed.

    `path_rows` rows for each round that comes to the host, those of its path and others behind them; then one
    for each such single; then, in order, `chunks[i]` rows for the end of chunk i. `stay`: of rounds and
    singles; None: its features come to the host. `mailed`: of chunks; None: none of it stays. `rows`: None:
    nothing comes to the host.
    """

    rows: torch.Tensor | None
    path_rows: int
    chunks: SequenceOf[int]
    stay: SequenceOf[DeviceResident | None]
    mailed: SequenceOf[DeviceResident | None]

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
        for one, count, resident in zip(landed, self.chunks, self.mailed, strict=False):
            if resident is not None:
                results.append(resident.of(one))
                continue
            results.append(one._replace(features=self._rows(first, count) if count else None))
            first += count
        return results + decoded

    def _rows(self, first: int, count: int) -> torch.Tensor:
        assert self.rows is not None
        return self.rows[first : first + count]


def chunk_ends(chunks: SequenceOf[SequenceWork]) -> list[int]:
    """Counts the rows at the end of each chunk whose features a drafter may need on the host."""
    return [
        max(0, min(len(work.tokens), work.start + len(work.tokens) + ROWS - len(work.seq)))
        if work.seq.generation.request.speculative and not work.mailed_rows
        else 0
        for work in chunks
    ]


def mailed_ends(
    chunks: SequenceOf[SequenceWork], keeper: DeviceFeatures | None
) -> list[DeviceResident | None]:
    """Marks the chunks whose last rows the device sends to their drafter. `keeper`: as of `staying`."""
    return [
        DeviceResident(keeper, work.seq.slot, work.seq.ring.generation, work.mailed_rows)
        if keeper is not None and work.seq.ring is not None and work.mailed_rows
        else None
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
