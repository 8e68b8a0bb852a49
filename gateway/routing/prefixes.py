"""The prompts sent to each worker: an estimate of its prefix cache, made without asking.

It serves where a worker does not say what it holds, and until it says what it was just sent. A wrong one
costs a prompt computed twice, never a token.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from eyas.common.page_names import ID_BYTES, SHORT_BYTES

MAX_BLOCKS = 1 << 16  # remembered over all prompts and workers: about 15 MB
FINE, COARSE = 16, 256  # tokens of a block
FINE_BLOCKS = 64
"""That many blocks are fine, and all behind them coarse: of a long prompt, the last tokens matter little."""

Holder = tuple[str, int]  # a worker and its epoch: a new pool holds nothing


def block_names(ids: bytes) -> list[bytes]:
    """The names of a prompt's blocks, each a digest of all tokens up to its end; `ids`: packed.

    The last token is in none: it is always computed again.
    """
    names, name, begin, end = list[bytes](), b"", 0, ID_BYTES * FINE
    while end < len(ids):
        name = hashlib.blake2b(name + ids[begin:end], digest_size=SHORT_BYTES).digest()
        names.append(name)
        begin, end = end, ID_BYTES * tokens_of(len(names) + 1)
    return names


def tokens_of(blocks: int) -> int:
    """How many tokens a prompt's first blocks have."""
    return FINE * min(blocks, FINE_BLOCKS) + COARSE * max(blocks - FINE_BLOCKS, 0)


class PrefixIndex:
    """The last `max_blocks` blocks that were sent, to which worker, and when.

    `names`: of a prompt, in order.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[tuple[Holder, bytes], float] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, holder: Holder, names: Sequence[bytes], now: float) -> None:
        """Notes that the holder was sent these blocks, and forgets the oldest ones beyond `max_blocks`."""
        # From the end, so that a block is never forgotten before those that follow it.
        blocks = self._blocks
        for name in reversed(names):
            block = holder, name
            blocks[block] = now
            blocks.move_to_end(block)
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)

    def matched(self, holder: Holder, names: Sequence[bytes], since: float) -> int:
        """How many tokens at the start of the prompt the holder was sent, none of them before `since`."""
        blocks = self._blocks
        count = bisect_left(names, True, key=lambda name: blocks.get((holder, name), -1.0) < since)
        return tokens_of(count)
