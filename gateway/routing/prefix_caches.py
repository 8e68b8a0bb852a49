"""Tracks the prefix caches of workers, by their own reports and by the prompts that were sent to them.

A stream per worker follows its reports, and is reopened when it breaks. The prompts sent to a worker give an
estimate, for a worker that reports nothing and for recent prompts that are not in its reports yet. A wrong
estimate makes a prompt be computed twice; it never changes a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import cached_property

from eyas.common.page_names import ID_BYTES, SHORT_BYTES, CacheNews, PageNames, PageShape, packed, split
from eyas.common.wire import rpc
from eyas.common.wire.clients import InfoClient

MAX_BLOCKS = 1 << 16  # over all prompts and workers: about 15 MB
FINE, COARSE = 16, 256  # tokens of a block
FINE_BLOCKS = 64
"""The first blocks of a prompt are fine, and all later ones coarse: of a long prompt, the last tokens matter
little."""

Holder = tuple[str, int]  # a worker and its epoch: the pool of a new epoch is empty
AGAIN_S = 1.0  # from the end of a stream to the next


class PromptPages:
    """The names of a prompt's pages, computed once per shape of pages, and of its blocks.

    `session`: the name of the conversation, if it has one. `salt`: part of all names. `adapter`: the id of
    the adapter that computes the prompt.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int] = (),
        session: str = "",
        salt: bytes = b"",
        adapter: str = "",
    ) -> None:
        self.session = session
        self.adapter = adapter
        self._salt = salt
        self._ids = packed(prompt_ids)
        self._names: dict[PageShape, PageNames] = {}

    def names(self, shape: PageShape) -> PageNames:
        """The short names of the pages that a cache can serve."""
        if shape not in self._names:
            self._names[shape] = shape.names(self._ids, self._salt)
        return self._names[shape]

    @cached_property
    def blocks(self) -> list[bytes]:
        """The names of the blocks, by which the gateway records the prompts that it sends."""
        return block_names(self._ids, self._salt)


class WorkerPages:
    """The pages of one worker's pool."""

    def __init__(self, news: CacheNews, now: float) -> None:
        self.epoch = news.epoch
        self.shape = news.shape
        # the last time at which the pool may have been empty, perhaps just before its first report
        self.emptied = 0.0 if news.added else now
        self._names: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._names)

    def apply(self, news: CacheNews, now: float) -> None:
        """Applies the next report of the worker."""
        lost = bool(news.dropped or (news.whole and self._names))
        if news.whole:
            self._names.clear()
        self._names.difference_update(split(news.dropped))
        if lost and not self._names and not (news.whole and news.added):
            self.emptied = now
        self._names.update(split(news.added))

    def matched(self, prefix: PromptPages) -> int:
        """The number of tokens at the start of the prompt that are cached.

        Caches evict a page after those that follow it, so the first missing page is found by exponential,
        then binary search: few names are computed if little is cached.
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

    def apply(self, worker: str, news: CacheNews, now: float) -> None:
        """Applies a report of a worker, at `now`. A new pool replaces the pages of an earlier one."""
        known = self._workers.get(worker)
        if known is None or known.epoch != news.epoch:
            if not news.whole:
                return  # of an older stream
            known = self._workers[worker] = WorkerPages(news, now)
        known.apply(news, now)

    def of(self, worker: str, epoch: int) -> WorkerPages | None:
        """Returns the worker's pages in the pool of this epoch; None if it has not reported."""
        known = self._workers.get(worker)
        return known if known is not None and known.epoch == epoch else None

    def forget(self, worker: str) -> None:
        """Drops the pages of a worker."""
        self._workers.pop(worker, None)


def block_names(ids: bytes, salt: bytes) -> list[bytes]:
    """The names of a prompt's blocks, each a digest of all tokens up to its end. `ids`: the packed tokens.

    No block contains the last token, which is always computed.
    """
    names, name, begin, end = list[bytes](), salt, 0, ID_BYTES * FINE
    while end < len(ids):
        name = hashlib.blake2b(name + ids[begin:end], digest_size=SHORT_BYTES).digest()
        names.append(name)
        begin, end = end, ID_BYTES * tokens_of(len(names) + 1)
    return names


def tokens_of(blocks: int) -> int:
    """The number of tokens in this number of first blocks of a prompt."""
    return FINE * min(blocks, FINE_BLOCKS) + COARSE * max(blocks - FINE_BLOCKS, 0)


class PrefixIndex:
    """The last `max_blocks` blocks that were sent, with their workers and times. `names`: of the blocks of
    one prompt, in order.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[tuple[Holder, bytes], float] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, holder: Holder, names: Sequence[bytes], now: float) -> None:
        """Records that the holder was sent these blocks, and drops the oldest ones beyond `max_blocks`."""
        # From the end, so that a block is never dropped before those that follow it.
        blocks = self._blocks
        for name in reversed(names):
            block = holder, name
            blocks[block] = now
            blocks.move_to_end(block)
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)

    def matched(self, holder: Holder, names: Sequence[bytes], since: float) -> int:
        """The number of tokens at the start of the prompt that the holder was sent at `since` or later."""
        blocks = self._blocks
        count = bisect_left(names, True, key=lambda name: blocks.get((holder, name), -1.0) < since)
        return tokens_of(count)


class CacheWatch:
    """Keeps `holdings` up to date with the followed workers. The caller owns `channels`."""

    def __init__(self, channels: rpc.ChannelPool, holdings: CachedPrefixes) -> None:
        self._channels = channels
        self._holdings = holdings
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def follow(self, workers: Collection[str]) -> None:
        """Follows these workers and no others."""
        for worker in self._tasks.keys() - set(workers):
            self._tasks.pop(worker).cancel()
        for worker in set(workers) - self._tasks.keys():
            self._tasks[worker] = asyncio.create_task(self._watch(worker), name=f"cache of {worker}")

    async def aclose(self) -> None:
        """Ends all streams."""
        tasks = list(self._tasks.values())
        self.follow(())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, worker: str) -> None:
        try:
            while True:
                await self._follow_reports(worker)
                self._holdings.forget(worker)  # without reports its cache is unknown
                await asyncio.sleep(AGAIN_S)
        finally:
            self._holdings.forget(worker)

    async def _follow_reports(self, worker: str) -> None:
        """Applies the reports of the worker until the stream ends."""
        client = InfoClient(self._channels.get(worker))
        try:
            async with contextlib.aclosing(client.cached()) as stream:
                async for news in stream:
                    self._holdings.apply(worker, news, time.monotonic())
        except Exception as error:
            rpc.as_eyas(error, f"following the cache of {worker}")  # a defect is logged
