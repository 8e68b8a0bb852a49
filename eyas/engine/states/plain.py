"""A layer with a state in plain torch, over the slots of its sequences: the specification of the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from eyas.engine.states.delta import DeltaRows, DeltaRule, DeltaState
from eyas.engine.states.rows import StateRows
from eyas.engine.states.store import LayerStates, RunningState


def recur(
    rows: StateRows, stored: LayerStates, rule: DeltaRule, inputs: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """inputs [m, shape.inputs] and gates float32 [m, shape.gates] of a forward's rows -> what each row reads,
    [m, value heads * value size], of the inputs' dtype.

    Folds certain rows into each sequence's state up to where it must stand, and stores the rows from there
    on. Rows are walked from a slot's state on, or from where the same stay's state was left behind the first
    row of the forward before: both give the same bits, since a state is one chain of operations.
    """
    new = DeltaRows(inputs, *gates.split(rule.shape.gate_counts, 1))
    sequences = list(_sequences(rows, stored, new))
    parents: list[int] = []
    at: list[int] = []
    behind: list[int] = []
    for number, each in enumerate(sequences):
        first = len(parents)
        parents += [first + row if row >= 0 else -1 - number for row in each.before]
        at += range(first + each.old, len(parents))
        behind += [first + row for row in each.behind]
    start = DeltaState(
        *(torch.stack(parts) for parts in zip(*(each.state for each in sequences), strict=True))
    )
    every = DeltaRows(*(torch.cat(parts) for parts in zip(*(each.rows for each in sequences), strict=True)))
    reads, states = rule.walk(start, every, parents, at, behind)
    left = iter(states)
    for each in sequences:
        each.store(stored, {row: next(left) for row in each.behind})
    places = [row for each in sequences for row in each.places]
    out = inputs.new_empty(len(inputs), reads.shape[1] * reads.shape[2])
    out[torch.tensor(places)] = reads.flatten(1).to(inputs.dtype)
    return out


@dataclass(frozen=True)
class _Sequence:
    """A sequence's `rows` from position `base` on, where its `state` [*shape.state] is known. The first `old`
    of them are stored, and the others are in the forward, at `places`. `fold`: where its slot's state must
    stand, -1: where it stands already. `before`: the row that precedes each row, -1: the state does. `stay`:
    as of `StateRows`.
    """

    slot: int
    stay: int
    base: int
    old: int
    fold: int
    places: range
    before: list[int]
    state: DeltaState
    rows: DeltaRows

    @property
    def behind(self) -> list[int]:
        """The rows behind which its state is stored: the last one that is folded, and the forward's first
        one, which is certain, for the next forward to go on from.
        """
        folded = [self.fold - self.base - 1] if self.fold > self.base else []
        return folded + ([self.old] if self._runs else [])

    @property
    def _runs(self) -> bool:
        return self.stay >= 0 and self.base + self.old >= self.fold

    def store(self, stored: LayerStates, states: dict[int, torch.Tensor]) -> None:
        """Stores the `states` behind those rows, and the new rows that are not folded."""
        due = max(self.fold - self.base, 0)
        if self.fold >= 0:
            stored.states[self.slot] = states[due - 1] if due else self.state.state
            stored.tails[self.slot] = _last(self.state.tail, self.rows.inputs[:due])
        first = max(self.old, due)
        numbers = torch.arange(self.base + first, self.base + len(self.before)) % stored.inputs.shape[1]
        stored.inputs[self.slot, numbers] = self.rows.inputs[first:]
        stored.gates[self.slot, numbers] = torch.cat((self.rows.decay, self.rows.beta), 1)[first:]
        if self._runs:
            row = self.base + self.old + 1
            stored.running[self.slot] = RunningState(self.stay, row, states[self.old].clone())


def _sequences(rows: StateRows, stored: LayerStates, new: DeltaRows) -> Iterator[_Sequence]:
    """The sequences that have rows in the forward."""
    numbers = (rows.slots, rows.firsts, rows.counts, rows.starts, rows.bounds, rows.folds)
    counts = [new.decay.shape[1], new.beta.shape[1]]
    stays = rows.stays or (-1,) * len(rows.slots)
    before = rows.before.tolist()
    columns = zip(*(each.tolist() for each in numbers), stays, strict=True)
    for slot, first, count, start, bound, fold, stay in columns:
        if not count:
            continue
        base, state = _begun(stored, slot, bound, (stay, start))
        places, ring = range(first, first + count), torch.arange(base, start) % stored.inputs.shape[1]
        old = DeltaRows(stored.inputs[slot, ring], *stored.gates[slot, ring].split(counts, 1))
        own = new.some(slice(first, first + count))
        every = DeltaRows(*(torch.cat(pair) for pair in zip(old, own, strict=True)))
        parents = [*range(-1, start - base - 1), *(before[place] - base for place in places)]
        due = fold if fold > bound else -1
        yield _Sequence(slot, stay, base, start - base, due, places, parents, state, every)


def _begun(stored: LayerStates, slot: int, bound: int, now: tuple[int, int]) -> tuple[int, DeltaState]:
    """The last position before `now` (stay, start) where the sequence's state is known, and that state."""
    state = DeltaState(stored.states[slot], stored.tails[slot])
    if not bound:
        state = DeltaState(*map(torch.zeros_like, state))
    running, (stay, start) = stored.running.get(slot), now
    if running is None or running.stay != stay or not bound < running.row <= start:
        return bound, state
    ring = torch.arange(bound, running.row) % stored.inputs.shape[1]
    return running.row, DeltaState(running.state, _last(state.tail, stored.inputs[slot, ring]))


def _last(tail: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """The convolution's inputs before the row behind `inputs`, of which `tail` are those before."""
    return torch.cat((tail, inputs))[len(inputs) :]
