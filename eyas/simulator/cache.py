"""The prefix cache of a simulated worker: which blocks it holds, the least recently used forgotten first."""

from __future__ import annotations

from collections import OrderedDict

from eyas.simulator.workload import BLOCK_TOKENS


class BlockCache:
    """At most as many blocks as its owner leaves it."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def cached(self, blocks: tuple[int, ...], prompt: int) -> int:
        """Tokens at the start of a prompt that are here; never all: the last one is always computed."""
        found = 0
        for block in blocks:
            if block not in self._blocks:
                break
            found += BLOCK_TOKENS
        return min(found, prompt - 1)

    def add(self, blocks: tuple[int, ...], room: int) -> None:
        """Holds `blocks`, and forgets the oldest until all take at most `room` tokens."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while self._blocks and len(self._blocks) * BLOCK_TOKENS > room:
            self._blocks.popitem(last=False)
