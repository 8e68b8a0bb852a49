"""The allocator of a staging area's slots, each for a whole page."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class SlotAllocator:
    """A free list. Every slot taken is given back once; several are taken together or not at all.

    The lowest ones are taken, in order: copies of neighbours are one copy.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._free = sorted(numbers)  # a heap
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """The number of slots that are not taken."""
        return len(self._free)

    @property
    def total(self) -> int:
        """The number of all slots."""
        return len(self._free) + len(self._taken)

    def take(self, count: int) -> list[int] | None:
        """Takes `count` slots; None: not now. Raises AssertionError if there will never be as many."""
        if count > self.total:
            raise AssertionError(f"{count} staging slots asked for, there are {self.total}")
        if count > len(self._free):
            return None
        slots = [heapq.heappop(self._free) for _ in range(count)]
        self._taken.update(slots)
        return slots

    def give(self, slots: Iterable[int]) -> None:
        """Takes slots back. Raises AssertionError for one that is not taken."""
        for slot in slots:
            if slot not in self._taken:
                raise AssertionError(f"staging slot {slot} is not taken")
            self._taken.remove(slot)
            heapq.heappush(self._free, slot)
