"""Weighted fair queueing between callers, and priorities within one caller.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), by caller: each has a virtual time, which what it gets
moves on by cost over weight; the caller with the least is next. One that comes back begins at the time that
the others have reached: it saves nothing up, and who floods waits behind himself alone. Within a caller the
order is by arrival, which a priority moves by `PRIORITY_S` per unit: so a request is overtaken only by those
that come within a bounded time after it. Pure values: no clock, no requests.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from eyas.common.params import PRIORITY_S

Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True)
class QueueClaim:
    """The claim of a queued item.

    `cost`: its work, in any unit. `priority`: lower is earlier. `arrived`: seconds.
    """

    caller: str
    cost: float = 1.0
    weight: float = 1.0
    priority: int = 0
    arrived: float = 0.0


class FairQueue(Generic[Item]):
    """Items that wait, by caller."""

    def __init__(self) -> None:
        self._lines: dict[str, list[tuple[float, int, Item]]] = {}
        self._claims: dict[Item, tuple[QueueClaim, tuple[float, int, Item]]] = {}
        self._times: dict[str, float] = {}  # virtual, by caller
        self._now = 0.0  # the virtual time of the last that was served
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, item: Item, claim: QueueClaim) -> None:
        """The item waits from now on."""
        if claim.caller not in self._lines:
            self._times = {
                caller: at for caller, at in self._times.items() if at > self._now or caller in self._lines
            }
            self._times[claim.caller] = max(self._times.get(claim.caller, 0.0), self._now)
        entry = (claim.arrived + PRIORITY_S * claim.priority, next(self._numbers), item)
        insort(self._lines.setdefault(claim.caller, []), entry)
        self._claims[item] = claim, entry

    def first(self) -> Item:
        """The item whose turn it is. At least one must wait."""
        caller = min(self._lines, key=lambda caller: (self._times[caller], self._lines[caller][0]))
        return self._lines[caller][0][-1]

    def serve(self, item: Item) -> None:
        """The item gets what it asked for, and waits no more."""
        claim, _ = self._claims[item]
        self._now = max(self._now, self._times[claim.caller])
        self._times[claim.caller] += claim.cost / claim.weight
        self.remove(item)

    def remove(self, item: Item) -> None:
        """The item waits no more. Nothing if it did not."""
        if item not in self._claims:
            return
        claim, entry = self._claims.pop(item)
        line = self._lines[claim.caller]
        line.remove(entry)
        if not line:
            del self._lines[claim.caller]
        if not self._lines:
            self._times.clear()  # the server is idle, and what each got no longer counts
            self._now = 0.0
