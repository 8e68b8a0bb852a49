"""Which experts of a layer get replicas, and on which ranks: a pure function of the loads that were counted.

Every expert has a home, one of equally many slots of its rank, and is never without it. A rank may have spare
slots behind those; each takes a replica of an expert of another rank. The rows that chose an expert are dealt
out evenly among its copies. All ranks wait for the busiest in every layer, so what counts is how even their
sums are. The idea, further copies of what is busiest where least is done, is that of DeepSeek's EPLB; homes
stay where they are, so a plan moves nothing but replicas.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NONE = -1
"""In the place of an expert: the slot is empty."""

GAIN = 1e-3
"""A further replica makes the squares of the ranks' loads smaller by this part of them, or it is not made."""

Replicas = tuple[int, ...]
"""The expert in each spare slot of a layer, or NONE: rank after rank."""

Loads = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ExpertSlots:
    """The slots of a layer's experts, numbered through the ranks: of each rank its equal share of the
    experts, in their order, then its `spares`.
    """

    experts: int
    ranks: int
    spares: int = 0

    @property
    def homes(self) -> int:
        """Experts of which a rank is the home."""
        return self.experts // self.ranks

    @property
    def each(self) -> int:
        """Slots of a rank."""
        return self.homes + self.spares

    def home(self, expert: int) -> int:
        """The slot of an expert that it always has."""
        return expert // self.homes * self.each + expert % self.homes

    def spare(self, number: int) -> int:
        """The slot of an entry of `Replicas`."""
        return number // self.spares * self.each + self.homes + number % self.spares

    @property
    def empty(self) -> Replicas:
        """No replica anywhere."""
        return (NONE,) * (self.ranks * self.spares)

    def copies(self, replicas: Replicas) -> list[list[int]]:
        """The slots of each expert, its home first."""
        copies = [[self.home(expert)] for expert in range(self.experts)]
        for number, expert in enumerate(replicas):
            if expert != NONE:
                copies[expert].append(self.spare(number))
        return copies

    def table(self, replicas: Replicas) -> npt.NDArray[np.int32]:
        """The number of each expert's copies, then their slots: int32 [experts, 1 + ranks]."""
        table = np.zeros((self.experts, 1 + self.ranks), np.int32)
        for expert, slots in enumerate(self.copies(replicas)):
            table[expert, : 1 + len(slots)] = len(slots), *slots
        return table

    def owners(self, replicas: Replicas) -> npt.NDArray[np.int64]:
        """The expert in each slot, 0 in an empty one: int64 [slots]."""
        owners = np.zeros(self.ranks * self.each, np.int64)
        for expert, slots in enumerate(self.copies(replicas)):
            owners[slots] = expert
        return owners


def rank_loads(loads: Loads, slots: ExpertSlots, replicas: Replicas) -> Loads:
    """The load of each rank, [ranks], if rows choose experts as often as `loads` [experts] says."""
    done = np.zeros(slots.ranks)
    for load, copies in zip(loads, slots.copies(replicas), strict=True):
        for slot in copies:
            done[slot // slots.each] += load / len(copies)
    return done


def unevenness(loads: Loads, slots: ExpertSlots, replicas: Replicas) -> float:
    """The load of the busiest rank over the mean: 1.0 is even. Nothing to do is even, too."""
    done = rank_loads(loads, slots, replicas)
    return float(done.max() / done.mean()) if done.any() else 1.0


def planned(loads: Loads, slots: ExpertSlots, before: Replicas) -> Replicas:
    """The replicas for these loads [experts]; those that were there `before` and stay keep their slots."""
    holds = np.zeros((slots.experts, slots.ranks), bool)  # which ranks have a copy of an expert
    holds[np.arange(slots.experts), np.arange(slots.experts) // slots.homes] = True
    free = np.full(slots.ranks, slots.spares)
    while free.any() and (chosen := _next(loads, holds, free)) is not None:
        expert, rank = chosen
        holds[expert, rank] = True
        free[rank] -= 1
    homes = np.arange(slots.experts) // slots.homes
    each = [
        [int(expert) for expert in np.flatnonzero(holds[:, rank] & (homes != rank))]
        for rank in range(slots.ranks)
    ]
    return tuple(
        expert
        for rank, mine in enumerate(each)
        for expert in _in_their_slots(mine, before[slots.spares * rank : slots.spares * (rank + 1)])
    )


def _next(loads: Loads, holds: npt.NDArray[np.bool_], free: npt.NDArray[np.int64]) -> tuple[int, int] | None:
    """The expert of the busiest rank, and the rank with a free slot, whose further copy makes the ranks'
    loads most even, by the sum of their squares; None: none makes them more even.
    """
    copies = holds.sum(1)
    done = (holds * (loads / copies)[:, None]).sum(0)
    mine = np.flatnonzero(holds[:, done.argmax()])
    less, more = loads[mine] / copies[mine], loads[mine] / (copies[mine] + 1)
    left = done - holds[mine] * (less - more)[:, None]  # [mine, ranks]: all copies of one do less
    squares = (left**2).sum(1)[:, None] + 2 * left * more[:, None] + (more**2)[:, None]
    squares[holds[mine] | (free == 0)] = np.inf
    best = int(squares.argmin())
    if not squares.flat[best] < (done**2).sum() * (1 - GAIN):
        return None
    return int(mine[best // holds.shape[1]]), best % holds.shape[1]


def _in_their_slots(experts: list[int], before: Replicas) -> list[int]:
    """A rank's replicas by slots: those that were there stay, the others fill the rest in their order."""
    new = list((Counter(experts) - Counter(before)).elements())
    stay = [expert if expert in experts else NONE for expert in before]
    return [expert if expert != NONE or not new else new.pop(0) for expert in stay]
