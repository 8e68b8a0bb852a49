"""Pieces of work that wait for a turn: which is next, and which is refused once too much waits.

What was begun goes before what is new, so that nothing piles up half done; within either, callers take turns
(`gateway.limits.turns`), and so do the small and the large pieces of one. What is new is bounded in bytes:
past the bound, who holds most for its weight loses its newest. Pure values: no clock, no event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from gateway.limits.turns import FairQueue, QueueClaim

Item = TypeVar("Item", bound=Hashable)
Holder = tuple[str, bool]  # a caller, and whether its pieces are large


class BoundedQueue(Generic[Item]):
    """At most `most` bytes of new pieces wait."""

    def __init__(self, most: int, small: int, weight: Callable[[str], float]) -> None:
        """`small`: bytes of the largest piece that is small."""
        self._most = most
        self._small = small
        self._weight = weight
        self._begun: FairQueue[Item] = FairQueue()
        self._new: FairQueue[Item] = FairQueue()
        self._sizes: dict[Holder, dict[Item, int]] = {}  # of new pieces, the oldest first
        self._holders: dict[Item, Holder] = {}
        self._begun_sizes: dict[Item, int] = {}
        self._new_bytes = 0

    def __len__(self) -> int:
        return len(self._begun) + len(self._new)

    @property
    def waiting(self) -> int:
        """Bytes of all that wait."""
        return self._new_bytes + sum(self._begun_sizes.values())

    def add_begun(self, item: Item, caller: str, size: int) -> None:
        """The rest of work that had its first turn."""
        self._begun.add(item, self._claim(caller, size))
        self._begun_sizes[item] = size

    def add_new(self, item: Item, caller: str, size: int) -> list[Item]:
        """Gives the pieces that are refused for it, this one perhaps: they wait no more."""
        self._new.add(item, self._claim(caller, size))
        holder = caller, size > self._small
        self._holders[item] = holder
        self._sizes.setdefault(holder, {})[item] = size
        self._new_bytes += size
        refused = []
        while self._new_bytes > self._most:
            refused.append(next(reversed(self._sizes[self._heaviest()])))
            self.remove(refused[-1])
        return refused

    def next(self) -> Item:
        """The piece whose turn it is, which waits no more. At least one must wait."""
        turns = self._begun or self._new
        item = turns.first()
        turns.serve(item)
        self.remove(item)
        return item

    def remove(self, item: Item) -> None:
        """It waits no more. Nothing if it did not."""
        self._begun.remove(item)
        self._new.remove(item)
        self._begun_sizes.pop(item, None)
        if (holder := self._holders.pop(item, None)) is not None:
            own = self._sizes[holder]
            self._new_bytes -= own.pop(item)
            if not own:
                del self._sizes[holder]

    def _claim(self, caller: str, size: int) -> QueueClaim:
        kind = "large" if size > self._small else "small"
        return QueueClaim(f"{caller}\0{kind}", float(size), self._weight(caller))

    def _heaviest(self) -> Holder:
        """Of the caller who holds most, for its weight, the kind of which it holds more."""
        kinds = {holder: sum(own.values()) for holder, own in self._sizes.items()}
        held = Counter[str]()
        for (caller, _), size in kinds.items():
            held[caller] += size
        return max(kinds, key=lambda kind: (held[kind[0]] / self._weight(kind[0]), kinds[kind]))
