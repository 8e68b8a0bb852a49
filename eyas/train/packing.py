"""Texts as batches of one shape: several texts share a row, and each keeps positions and company of its own.

Which texts stand where follows from (seed, number of the batch) alone, so that a run can go on where it
ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

OPEN = 16  # rows that are filled at a time: the next text goes into the first with room
MOST_TEXTS = 64  # in a row


@dataclass(frozen=True)
class TrainingExample:
    """A text: int32 ids [n], and whether each is part of an answer, bool [n]."""

    ids: np.ndarray
    answer: np.ndarray

    def cut(self, length: int) -> TrainingExample:
        """A copy of its first `length` tokens."""
        return TrainingExample(self.ids[:length], self.answer[:length])


@dataclass(frozen=True)
class PackedBatch:
    """Rows of L tokens, R of which are of texts.

    `ids`, `positions` int64 [B, L]; `segments` int64 [B, L]: which text of its row a token is of, from 1 on
    (0: padding, after all texts); `answer` bool [B, L]. `places` int64 [R]: where in [B * L] the tokens of
    texts are, text after text. `lengths`: of the texts, always on the host.
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor
    answer: Tensor
    places: Tensor
    lengths: tuple[int, ...]

    def to(self, device: torch.device) -> PackedBatch:
        """A copy on a device, made without waiting for what it is doing."""
        return PackedBatch(
            ids=upload(self.ids, device),
            positions=upload(self.positions, device),
            segments=upload(self.segments, device),
            answer=upload(self.answer, device),
            places=upload(self.places, device),
            lengths=self.lengths,
        )


def upload(part: Tensor, device: torch.device) -> Tensor:
    """A host's tensor on a device: from pinned memory, so that the host does not wait."""
    return part if device.type == "cpu" else part.pin_memory().to(device, non_blocking=True)


def rows_of(examples: Sequence[TrainingExample], length: int) -> Iterator[list[TrainingExample]]:
    """The texts of each row. A longer text is cut."""
    filling: list[list[TrainingExample]] = []
    for example in (example.cut(length) for example in examples):
        row = next((row for row in filling if _fits(row, example, length)), None)
        if row is None:
            if len(filling) == OPEN:
                yield filling.pop(int(np.argmax([_size(row) for row in filling])))
            filling.append(row := [])
        row.append(example)
    yield from filling


def batch_of(rows: Sequence[list[TrainingExample]], length: int) -> PackedBatch:
    """Rows padded to one length."""
    ids, positions, segments = (np.zeros((len(rows), length), np.int64) for _ in range(3))
    answer = np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        at = 0
        for number, example in enumerate(row, start=1):
            here = slice(at, at + len(example.ids))
            ids[i, here], answer[i, here] = example.ids, example.answer
            positions[i, here], segments[i, here] = np.arange(len(example.ids)), number
            at += len(example.ids)
    return PackedBatch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        segments=torch.from_numpy(segments),
        answer=torch.from_numpy(answer),
        places=torch.from_numpy(np.flatnonzero(segments)),
        lengths=tuple(len(example.ids) for row in rows for example in row),
    )


@dataclass(frozen=True)
class PackedBatches:
    """All batches of a run: `rows` rows of `length` tokens; every text comes once before any comes again."""

    examples: Sequence[TrainingExample]
    rows: int
    length: int
    seed: int

    def start(self, number: int) -> Iterator[PackedBatch]:
        """Batches from a number on, without end."""
        for rows in itertools.islice(self._in_rows(self._endless()), number, None):
            yield batch_of(rows, self.length)

    def once(self) -> Iterator[PackedBatch]:
        """Every text once, in order; the last batch may be short."""
        for rows in self._in_rows(rows_of(self.examples, self.length)):
            yield batch_of(rows, self.length)

    def _in_rows(self, rows: Iterator[list[TrainingExample]]) -> Iterator[list[list[TrainingExample]]]:
        while batch := list(itertools.islice(rows, self.rows)):
            yield batch

    def _endless(self) -> Iterator[list[TrainingExample]]:
        epoch = 0
        while True:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.examples))
            yield from rows_of([self.examples[i] for i in order], self.length)
            epoch += 1


def _fits(row: Sequence[TrainingExample], example: TrainingExample, length: int) -> bool:
    return len(row) < MOST_TEXTS and _size(row) + len(example.ids) <= length


def _size(row: Sequence[TrainingExample]) -> int:
    return sum(len(example.ids) for example in row)
