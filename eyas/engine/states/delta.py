"""The gated delta rule (arXiv 2412.06464) behind its convolution, row by row in float32: the specification.

A row first decays its state, then corrects what the state has for the row's key by a share of the difference
to the row's value, and then reads it by the row's query. In a state space model (arXiv 2405.21060) it adds a
multiple of its value for its key instead. A row's bits follow from the state that it stands
on, the rows of its own path and nothing else: all operations are of single elements, or sums by halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from eyas.engine.states.shape import DeltaShape

EPS = 1e-6
"""Under the root by which a query or a key is divided."""


class DeltaRows(NamedTuple):
    """n rows before the convolution: `inputs` [n, inputs], and each value head's logarithm of its decay (or
    those of its key elements) and its share of the correction, or the factor of what it adds: `decay` and
    `beta` float32, [n, each of shape.gate_counts].
    """

    inputs: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor

    def some(self, rows: slice | torch.Tensor) -> DeltaRows:
        """Some of the rows, in that order."""
        return DeltaRows(*(part[rows] for part in self))


class DeltaState(NamedTuple):
    """The states of s sequences, each at a position of its own: `state` float32 [s, *shape.state], and `tail`
    [s, *shape.tail], the inputs of the rows just before it (zeros where there is none).
    """

    state: torch.Tensor
    tail: torch.Tensor

    @classmethod
    def empty(cls, shape: DeltaShape, count: int, dtype: torch.dtype, device: str = "cpu") -> DeltaState:
        """The states of sequences without rows."""
        state = torch.zeros(count, *shape.state, device=device)
        return cls(state, torch.zeros(count, *shape.tail, dtype=dtype, device=device))


class MovingRows(NamedTuple):
    """The terms by which n rows move states: queries and keys [n, value heads, key size, 1], values [n, value
    heads, value size]; and decays and factors, with sides of 1 where they are the same for all.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor


@dataclass(frozen=True)
class DeltaRule:
    """The rule of one layer. `filters` float32 [kernel, inputs]: of the convolution of each column, the
    factor of a row itself the last of them; columns are neighbours in memory, as a row's are. `bias` [inputs]
    is added to it. `skip` [value heads], or of each element of a value: what a row reads grows by its value
    times that.
    """

    shape: DeltaShape
    filters: torch.Tensor
    bias: torch.Tensor | None = None
    skip: torch.Tensor | None = None

    def run(
        self, start: DeltaState, rows: DeltaRows, parents: Sequence[int], at: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The reading of each row, float32 [n, value heads, value size], or those `at` these numbers alone.

        `parents[i]`: the row before row i on its path, a lower number; or -1 - s: it is the first row behind
        state s.
        """
        return self.walk(start, rows, parents, range(len(parents)) if at is None else at)[0]

    def folded(self, start: DeltaState, rows: DeltaRows) -> DeltaState:
        """The states behind as many rows of each sequence, those of the first sequence first."""
        each = len(rows.decay) // start.state.shape[0]
        parents = [i - 1 if i % each else -1 - i // each for i in range(len(rows.decay))]
        _, states = self.walk(start, rows, parents, (), range(each - 1, len(parents), each))
        state = torch.stack(states)
        inputs = rows.inputs.view(len(state), each, -1).to(start.tail.dtype)
        tail = torch.cat((start.tail, inputs), 1)[:, -start.tail.shape[1] :]
        return DeltaState(state, tail.contiguous())

    def walk(
        self,
        start: DeltaState,
        rows: DeltaRows,
        parents: Sequence[int],
        at: Sequence[int],
        behind: Sequence[int] = (),
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The readings of rows `at` these numbers, as in `run`, and the states behind rows `behind` these,
        each float32 [*shape.state].
        """
        levels = _levels(parents)
        order = [row for level in levels for row in level]
        here = _index(order, start.state)
        q, k, v, decay, beta = (part[here] for part in self._moving(start, rows, parents))
        reads, states = torch.empty_like(v), dict[int, torch.Tensor]()
        state, before = start.state, [-1 - i for i in range(start.state.shape[0])]
        read, stored, first = frozenset(at), frozenset(behind), 0
        for level in levels:
            mine, first = slice(first, first + len(level)), first + len(level)
            state = _following(state, before, [parents[row] for row in level])
            state = state * self._left(decay[mine])
            added = v[mine] - _summed(state * k[mine]) if self.shape.corrects else v[mine]
            state.add_(k[mine] * (added * beta[mine])[..., None, :])
            if not read.isdisjoint(level):
                reads[mine] = _summed(state * q[mine])
            for row in stored.intersection(level):
                states[row] = state[level.index(row)]
            before = level
        if self.skip is not None:
            reads += v * self.skip.view(self.shape.value_heads, -1)
        places = {row: place for place, row in enumerate(order)}
        some = _index([places[row] for row in at], reads)
        return reads[some], [states[row] for row in behind]

    def _moving(self, start: DeltaState, rows: DeltaRows, parents: Sequence[int]) -> MovingRows:
        """The terms by which each row moves its state."""
        q, k, v = self._heads(self._activated(start, rows, parents))
        decay = rows.decay.exp().unflatten(1, (self.shape.value_heads, -1))[..., None]
        return MovingRows(q[..., None], k[..., None], v, decay, rows.beta[..., None])

    def _left(self, decay: torch.Tensor) -> torch.Tensor:
        """The share of a state that is left after each row, by some of `MovingRows.decay`."""
        return decay

    def _heads(self, made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """made [n, inputs] -> queries, keys and values, by value heads: [n, value heads, size]."""
        shape = self.shape
        sizes = (shape.key_heads * shape.key_size,) * 2
        q, k, v = made.split((*sizes, shape.inputs - sum(sizes)), 1)
        q, k = (each.view(-1, shape.key_heads, shape.key_size) for each in (q, k))
        if shape.corrects:
            q, k = _normed(q).mul_(shape.key_size**-0.5), _normed(k)
        q, k = (each.repeat_interleave(shape.value_heads // shape.key_heads, 1) for each in (q, k))
        return q, k, v.view(-1, shape.value_heads, shape.value_size)

    def _activated(self, start: DeltaState, rows: DeltaRows, parents: Sequence[int]) -> torch.Tensor:
        """silu of the convolution, float32 [n, inputs]."""
        made = self._convolved(start, rows, parents)
        return made.div_((-made).exp_().add_(1.0))

    def _convolved(self, start: DeltaState, rows: DeltaRows, parents: Sequence[int]) -> torch.Tensor:
        """The convolution along each row's path, float32 [n, inputs]."""
        tail = self.shape.kernel - 1
        before = torch.cat((start.tail.flatten(0, 1), rows.inputs.to(start.tail.dtype))).float()
        first = start.tail.shape[0] * tail
        windows = {-1 - i: list(range((i + 1) * tail - 1, i * tail - 1, -1)) for i in range(len(start.tail))}
        for row, parent in enumerate(parents):
            windows[row] = [first + row, *windows[parent]][: tail + 1]
        newest_first = torch.tensor([windows[row] for row in range(len(parents))], device=before.device)
        made = before[newest_first[:, tail]] * self.filters[0]
        for back in range(tail - 1, -1, -1):
            made += before[newest_first[:, back]] * self.filters[tail - back]
        if self.bias is not None:
            made += self.bias
        return made


def _levels(parents: Sequence[int]) -> list[list[int]]:
    """The rows by their distance from the state that they stand on."""
    levels: list[list[int]] = []
    depths: dict[int, int] = {}
    for row, parent in enumerate(parents):
        depths[row] = depths.get(parent, -1) + 1
        if depths[row] == len(levels):
            levels.append([])
        levels[depths[row]].append(row)
    return levels


def _following(state: torch.Tensor, before: list[int], parents: list[int]) -> torch.Tensor:
    """The states behind rows `before`, of which each of these `parents` is one."""
    if before == parents:
        return state
    places = {row: place for place, row in enumerate(before)}
    return state[_index([places[parent] for parent in parents], state)]


def _index(rows: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(rows), dtype=torch.int64, device=like.device)


def _summed(x: torch.Tensor) -> torch.Tensor:
    """The sum of x [..., n, m] over n, by halves; x is used up."""
    while (size := x.shape[-2]) > 1:
        half = (size + 1) // 2
        x.narrow(-2, 0, size - half).add_(x.narrow(-2, half, size - half))
        x = x.narrow(-2, 0, half)
    return x.squeeze(-2)


def _normed(x: torch.Tensor) -> torch.Tensor:
    """x [..., n] over the root of the sum of its squares."""
    return x / _summed((x * x)[..., None]).add_(EPS).sqrt_()
