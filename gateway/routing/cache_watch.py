"""Follows what workers say of their prefix caches: one stream per worker, opened again when it breaks.

It owns the streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection

from eyas.common.wire import rpc
from eyas.common.wire.clients import InfoClient
from gateway.routing.holdings import CachedPrefixes

AGAIN_S = 1.0  # from the end of a stream to the next


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
