"""Texts as batches of one shape: several texts share a row, and each keeps positions and company of its own.

Which texts stand where follows from (seed, number of the batch) alone, so that a run can go on where it
ended. It knows ids and answers; it knows no tokenizer and no model.
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
class Example:
    """A text: int32 ids [n], and whether each is part of an answer, bool [n]."""

    ids: np.ndarray
    answer: np.ndarray

    def cut(self, length: int) -> Example:
        """Its first `length` tokens."""
        return Example(self.ids[:length], self.answer[:length])


@dataclass(frozen=True)
class Batch:
    """Rows of L tokens. `ids`, `positions` int64 [B, L]; `segments` int64 [B, L]: which text of its row a
    token is of, from 1 on (0: padding, after all texts); `answer` bool [B, L].
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor
    answer: Tensor

    @property
    def real(self) -> Tensor:
        """Which tokens are of a text: bool [B, L]."""
        return self.segments > 0

    def pieces(self) -> list[list[int]]:
        """The texts, in the order of their tokens."""
        found = []
        for ids, segments in zip(self.ids.tolist(), self.segments.tolist(), strict=True):
            for number in range(1, max(segments) + 1):
                first = segments.index(number)
                found.append(ids[first : first + segments.count(number)])
        return found

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        parts = (self.ids, self.positions, self.segments, self.answer)
        return Batch(*(part.to(device, non_blocking=True) for part in parts))


def rows_of(examples: Sequence[Example], length: int) -> Iterator[list[Example]]:
    """The texts of each row. A longer text is cut."""
    filling: list[list[Example]] = []
    for example in (example.cut(length) for example in examples):
        row = next((row for row in filling if _fits(row, example, length)), None)
        if row is None:
            if len(filling) == OPEN:
                yield filling.pop(int(np.argmax([_size(row) for row in filling])))
            filling.append(row := [])
        row.append(example)
    yield from filling


def batch_of(rows: Sequence[list[Example]], length: int) -> Batch:
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
    return Batch(*map(torch.from_numpy, (ids, positions, segments, answer)))


@dataclass(frozen=True)
class Batches:
    """All batches of a run: `rows` rows of `length` tokens; every text comes once before any comes again."""

    examples: Sequence[Example]
    rows: int
    length: int
    seed: int

    def start(self, number: int) -> Iterator[Batch]:
        """Those from a number on, without end."""
        for rows in itertools.islice(self._in_rows(self._endless()), number, None):
            yield batch_of(rows, self.length)

    def once(self) -> Iterator[Batch]:
        """Every text once, in order; the last batch may be short."""
        for rows in self._in_rows(rows_of(self.examples, self.length)):
            yield batch_of(rows, self.length)

    def _in_rows(self, rows: Iterator[list[Example]]) -> Iterator[list[list[Example]]]:
        while batch := list(itertools.islice(rows, self.rows)):
            yield batch

    def _endless(self) -> Iterator[list[Example]]:
        epoch = 0
        while True:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.examples))
            yield from rows_of([self.examples[i] for i in order], self.length)
            epoch += 1


def _fits(row: Sequence[Example], example: Example, length: int) -> bool:
    return len(row) < MOST_TEXTS and _size(row) + len(example.ids) <= length


def _size(row: Sequence[Example]) -> int:
    return sum(len(example.ids) for example in row)
