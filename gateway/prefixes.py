"""Which pages were sent to which worker: an estimate of each worker's prefix cache, made without asking.

It serves where a worker does not say what it holds, and until it says what it was just sent. It knows names
of pages and how to forget; it refuses to know what the estimate is used for. A wrong one costs a prompt
computed twice, never a token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

MAX_PAGES = 1 << 16  # pages remembered over all prompts and workers: about 15 MB

Holder = tuple[str, int]  # a worker and its epoch: a new pool holds nothing


class PrefixIndex:
    """The last `max_pages` pages that were sent, to which worker, and when.

    `names`: of a prompt, in order.
    """

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self._max_pages = max_pages
        self._pages: OrderedDict[tuple[Holder, bytes], float] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, holder: Holder, names: Sequence[bytes], now: float) -> None:
        """Notes that the holder was sent these pages, and forgets the oldest ones beyond `max_pages`."""
        # From the end, so that a page is never forgotten before those that follow it.
        pages = self._pages
        for name in reversed(names):
            page = holder, name
            pages[page] = now
            pages.move_to_end(page)
        while len(self._pages) > self._max_pages:
            self._pages.popitem(last=False)

    def matched(self, holder: Holder, names: Sequence[bytes], since: float) -> int:
        """How many pages at the start of the prompt the holder was sent, none of them before `since`."""
        pages = self._pages
        return bisect_left(names, True, key=lambda name: pages.get((holder, name), -1.0) < since)
