"""Which prompts were sent to which worker: an estimate of each worker's prefix cache, made without asking.

It knows ids in pages and how to forget; it refuses to know what the estimate is used for. A wrong one costs a
prompt computed twice, never a token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

PAGE = 16  # ids per page
MAX_PAGES = 1 << 16  # pages remembered over all prompts and workers: about 15 MB

Prefix = tuple[int, ...]  # one hash per page of a prompt, of its ids and all ids before them
Holder = tuple[str, int]  # a worker and its epoch: a new pool holds nothing


def prefix_of(prompt_ids: Sequence[int]) -> Prefix:
    """The hashes of the whole pages that a cache can serve: the last id is always computed again."""
    hashes: list[int] = []
    chain = 0
    for end in range(PAGE, len(prompt_ids), PAGE):
        chain = hash((chain, tuple(prompt_ids[end - PAGE : end])))
        hashes.append(chain)
    return tuple(hashes)


class PrefixIndex:
    """The last `max_pages` pages that were sent, and to which worker."""

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self._max_pages = max_pages
        self._pages: OrderedDict[tuple[Holder, int], None] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, holder: Holder, prefix: Prefix) -> None:
        """Notes that the holder was sent these pages, and forgets the oldest ones beyond `max_pages`."""
        # From the end, so that a page is never forgotten before those that follow it.
        for page in reversed(prefix):
            self._pages[holder, page] = None
            self._pages.move_to_end((holder, page))
        while len(self._pages) > self._max_pages:
            self._pages.popitem(last=False)

    def matched(self, holder: Holder, prefix: Prefix) -> int:
        """How many ids at the start of the prompt the holder was sent before."""
        return PAGE * bisect_left(prefix, True, key=lambda page: (holder, page) not in self._pages)
