"""The contents of prefix caches, as workers report them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property

from eyas.common.cached_pages import CacheNews
from eyas.common.page_names import PageNames, PageShape, packed, split
from gateway.routing.prefixes import block_names


class PromptPages:
    """A prompt's pages by name, made once per shape of pages, and its blocks.

    `session`: the conversation's name, if it has one.
    """

    def __init__(self, prompt_ids: Sequence[int] = (), session: str = "") -> None:
        self.session = session
        self._ids = packed(prompt_ids)
        self._names: dict[PageShape, PageNames] = {}

    def names(self, shape: PageShape) -> PageNames:
        """The short names of the pages that a cache can serve."""
        if shape not in self._names:
            self._names[shape] = shape.names(self._ids)
        return self._names[shape]

    @cached_property
    def blocks(self) -> list[bytes]:
        """The names of the blocks by which a gateway remembers what it sent."""
        return block_names(self._ids)


class WorkerPages:
    """The pages of one worker's pool."""

    def __init__(self, news: CacheNews, now: float) -> None:
        self.epoch = news.epoch
        self.shape = news.shape
        # when it was last without any page, as far as is known: perhaps just before its first news
        self.emptied = 0.0 if news.added else now
        self._names: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._names)

    def hear(self, news: CacheNews, now: float) -> None:
        """Takes what the worker says, in order."""
        lost = bool(news.dropped or (news.whole and self._names))
        if news.whole:
            self._names.clear()
        self._names.difference_update(split(news.dropped))
        if lost and not self._names and not (news.whole and news.added):
            self.emptied = now
        self._names.update(split(news.added))

    def matched(self, prefix: PromptPages) -> int:
        """How many tokens at the start of the prompt are here. Caches forget a page after those that
        follow it, so the first missing page is found by doubling, then by halves: few names are made where
        little is cached.
        """
        names, known = prefix.names(self.shape), self._names
        most = 1
        while most < len(names) and names[most - 1] in known:
            most *= 2
        most = min(most, len(names))
        return self.shape.size * bisect_left(names, True, 0, most, key=lambda name: name not in known)


class CachedPrefixes:
    """The cached prefixes of workers: the newest pool that each has reported."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerPages] = {}

    def hear(self, worker: str, news: CacheNews, now: float) -> None:
        """Takes news of a worker, at `now`. What a pool held that is gone is forgotten with it."""
        known = self._workers.get(worker)
        if known is None or known.epoch != news.epoch:
            if not news.whole:
                return  # the rest of an older stream
            known = self._workers[worker] = WorkerPages(news, now)
        known.hear(news, now)

    def of(self, worker: str, epoch: int) -> WorkerPages | None:
        """Returns the worker's pages in this pool; None: it has not reported any."""
        known = self._workers.get(worker)
        return known if known is not None and known.epoch == epoch else None

    def forget(self, worker: str) -> None:
        """Forgets a worker."""
        self._workers.pop(worker, None)
