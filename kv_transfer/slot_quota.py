"""How many staging slots one peer may hold: one that has stopped, or is slow, leaves some to the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

PART = 3
"""Of six windows of slots one peer has four at most, and two have five together."""


class SlotQuota:
    """Counts slots by the peer that holds them.

    A peer that holds some gets more only while it then has no more than PART times those that are left; so
    there are always some for one that holds none. (As switches share their buffers: Choudhury and Hahne's
    dynamic thresholds.)
    """

    def __init__(self) -> None:
        self._taken: Counter[Hashable] = Counter()

    def allows(self, peer: Hashable, count: int, free: int) -> bool:
        """Whether a peer may take `count` of `free` slots, if there are as many."""
        held = self._taken[peer]
        return not held or held + count <= PART * (free - count)

    def taken(self, peer: Hashable, count: int) -> None:
        """It has taken `count` slots."""
        self._taken[peer] += count

    def given(self, peer: Hashable, count: int) -> None:
        """They are free again."""
        self._taken[peer] -= count
        if not self._taken[peer]:
            del self._taken[peer]
