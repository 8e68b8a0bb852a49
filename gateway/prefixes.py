"""Which prompts went to whom: a guess at what each worker's prefix cache holds, made without asking it.

It knows ids in pages and how to forget; it refuses to know what the guess is used for. A wrong guess costs
a prompt computed twice, never a token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

PAGE = 16  # ids a page
MAX_PAGES = 1 << 16  # remembered, of all prompts and workers together: about 15 MB

Prefix = tuple[int, ...]  # a hash for every page of a prompt: of its ids and all before them
Holder = tuple[str, int]  # a worker and its epoch: a pool that is made anew holds nothing


def prefix_of(prompt_ids: Sequence[int]) -> Prefix:
    """The whole pages of a prompt that a cache can serve: its last id is always computed again."""
    hashes: list[int] = []
    chain = 0
    for end in range(PAGE, len(prompt_ids), PAGE):
        chain = hash((chain, tuple(prompt_ids[end - PAGE : end])))
        hashes.append(chain)
    return tuple(hashes)


class PrefixIndex:
    """The newest `max_pages` pages that were sent to anybody."""

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self._max_pages = max_pages
        self._pages: OrderedDict[tuple[Holder, int], None] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, holder: Holder, prefix: Prefix) -> None:
        # From the end, so that a page is never forgotten before those that follow it.
        for page in reversed(prefix):
            self._pages[holder, page] = None
            self._pages.move_to_end((holder, page))
        while len(self._pages) > self._max_pages:
            self._pages.popitem(last=False)

    def matched(self, holder: Holder, prefix: Prefix) -> int:
        """How many of the prompt's first ids the holder was sent before."""
        return PAGE * bisect_left(prefix, True, key=lambda page: (holder, page) not in self._pages)
