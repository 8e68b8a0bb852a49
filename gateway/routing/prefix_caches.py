"""What workers have in their prefix caches, by their own reports, and by the prompts that were sent to them.

A stream per worker follows its reports, and is opened again when it breaks. The prompts sent to a worker give
an estimate. It counts where a worker reports nothing, and for what it was just sent. A wrong estimate costs a
prompt computed twice, never a token.
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

MAX_BLOCKS = 1 << 16  # remembered over all prompts and workers: about 15 MB
FINE, COARSE = 16, 256  # tokens of a block
FINE_BLOCKS = 64
"""That many blocks are fine, and all behind them coarse: of a long prompt, the last tokens matter little."""

Holder = tuple[str, int]  # a worker and its epoch: a new pool holds nothing
AGAIN_S = 1.0  # from the end of a stream to the next


class PromptPages:
    """A prompt's pages by name, made once per shape of pages, and its blocks.

    `session`: the conversation's name, if it has one. `salt`: of the names. `adapter`: the id of the one that
    computes it.
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
        """The names of the blocks by which a gateway remembers what it sent."""
        return block_names(self._ids, self._salt)


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


def block_names(ids: bytes, salt: bytes) -> list[bytes]:
    """The names of a prompt's blocks, each a digest of all tokens up to its end; `ids`: packed.

    The last token is in none: it is always computed again.
    """
    names, name, begin, end = list[bytes](), salt, 0, ID_BYTES * FINE
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


class CacheWatch:
    """Keeps `holdings` up with the workers that are followed; `channels` stay their owner's."""

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
                await self._hear(worker)
                self._holdings.forget(worker)  # what it holds is not known from here on
                await asyncio.sleep(AGAIN_S)
        finally:
            self._holdings.forget(worker)

    async def _hear(self, worker: str) -> None:
        """Takes what the worker says until the stream ends."""
        client = InfoClient(self._channels.get(worker))
        try:
            async with contextlib.aclosing(client.cached()) as stream:
                async for news in stream:
                    self._holdings.hear(worker, news, time.monotonic())
        except Exception as error:
            rpc.as_eyas(error, f"following the cache of {worker}")  # a defect is logged
