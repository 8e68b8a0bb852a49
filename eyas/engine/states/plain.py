"""A layer with a state in plain torch, over the slots of its sequences: the specification of the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from eyas.engine.states.delta import DeltaRows, DeltaRule, DeltaState
from eyas.engine.states.rows import StateRows
from eyas.engine.states.store import LayerStates


def recur(
    rows: StateRows, stored: LayerStates, rule: DeltaRule, inputs: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """inputs [m, shape.inputs] and gates float32 [m, shape.gates] of a forward's rows -> what each row reads,
    [m, value heads * value size], of the inputs' dtype.

    Folds certain rows into each sequence's state up to where it must stand, and stores the rows from there
    on.
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
        behind += [first + each.due - 1] if each.due else []
    start = DeltaState(
        *(torch.stack(parts) for parts in zip(*(each.state for each in sequences), strict=True))
    )
    every = DeltaRows(*(torch.cat(parts) for parts in zip(*(each.rows for each in sequences), strict=True)))
    reads, states = rule.walk(start, every, parents, at, behind)
    left = iter(states)
    for each in sequences:
        if each.due:
            stored.states[each.slot] = next(left)
            before = torch.cat((each.state.tail, each.rows.inputs[: each.due]))
            stored.tails[each.slot] = before[len(before) - len(each.state.tail) :]
        each.store(stored)
    places = [row for each in sequences for row in each.places]
    out = inputs.new_empty(len(inputs), reads.shape[1] * reads.shape[2])
    out[torch.tensor(places)] = reads.flatten(1).to(inputs.dtype)
    return out


@dataclass(frozen=True)
class _Sequence:
    """A sequence's rows from its state's position `bound` on, of which the first `old` are stored, and the
    first `due` are to be folded. `places`: of the others in the forward. `before`: the row that precedes each
    row, -1: the state does. A `state` is one of its own, [*shape.state].
    """

    slot: int
    bound: int
    old: int
    due: int
    places: range
    before: list[int]
    state: DeltaState
    rows: DeltaRows

    def store(self, stored: LayerStates) -> None:
        """Stores the new rows that are not folded."""
        first = max(self.old, self.due)
        numbers = torch.arange(self.bound + first, self.bound + len(self.before)) % stored.inputs.shape[1]
        stored.inputs[self.slot, numbers] = self.rows.inputs[first:]
        stored.gates[self.slot, numbers] = torch.cat((self.rows.decay, self.rows.beta), 1)[first:]


def _sequences(rows: StateRows, stored: LayerStates, new: DeltaRows) -> Iterator[_Sequence]:
    """The sequences that have rows in the forward."""
    numbers = (rows.slots, rows.firsts, rows.counts, rows.starts, rows.bounds, rows.folds)
    counts = [new.decay.shape[1], new.beta.shape[1]]
    before = rows.before.tolist()
    for slot, first, count, start, bound, fold in zip(*(each.tolist() for each in numbers), strict=True):
        if not count:
            continue
        state = DeltaState(stored.states[slot], stored.tails[slot])
        if not bound:
            state = DeltaState(*map(torch.zeros_like, state))
        places, ring = range(first, first + count), torch.arange(bound, start) % stored.inputs.shape[1]
        old = DeltaRows(stored.inputs[slot, ring], *stored.gates[slot, ring].split(counts, 1))
        own = new.some(slice(first, first + count))
        every = DeltaRows(*(torch.cat(pair) for pair in zip(old, own, strict=True)))
        parents = [*range(-1, start - bound - 1), *(before[place] - bound for place in places)]
        yield _Sequence(slot, bound, start - bound, fold - bound, places, parents, state, every)
