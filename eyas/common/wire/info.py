"""`WorkerService`: what a worker says of itself and of its links."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import grpc
import msgspec

from eyas.common.errors import InvalidRequest
from eyas.common.page_names import CacheNews
from eyas.common.types import Adapter, AdapterRoster, WorkerInfo
from eyas.common.wire import convert
from eyas.common.wire.links import PageLink, link_to_pb
from protos import worker_pb2, worker_pb2_grpc

SERVICE = "eyas.internal.v1.WorkerService"
CACHED_S = 0.2  # between two messages about the cache
MOST_WAIT_S = 600.0  # for requests to end, before a flush


class AdapterHost(Protocol):
    """The adapters of a worker."""

    async def load(self, adapter: Adapter) -> Adapter:
        """Reads the adapter, and returns it with its id and rank. Raises what is wrong with it."""
        ...

    async def set(self, roster: AdapterRoster) -> None:
        """Loads what the roster has, and unloads all else. Raises Busy for one that is older than its own."""
        ...


class NoAdapters(AdapterHost):
    """The adapters of a worker that loads none."""

    async def load(self, adapter: Adapter) -> Adapter:
        raise InvalidRequest("this worker loads no adapters (--max-loras)", param="lora_path")

    async def set(self, roster: AdapterRoster) -> None:
        raise InvalidRequest("this worker loads no adapters (--max-loras)", param="lora_name")


class InfoServicer(worker_pb2_grpc.WorkerServiceServicer):  # type: ignore[misc]
    """The service; `describe` gives the description of now, `probe` measures the links from an owner, `flush`
    empties the prefix cache within seconds and says how many pages it had, and `cached` says what changed in
    it since a number (`CachedPages.since`). `adapters`: where there are some.
    """

    def __init__(
        self,
        describe: Callable[[], WorkerInfo],
        probe: Callable[[str], Awaitable[list[PageLink]]],
        flush: Callable[[float], Awaitable[int]],
        cached: Callable[[int | None], CacheNews | None] = lambda number: None,
        adapters: AdapterHost | None = None,
    ) -> None:
        self._describe = describe
        self._probe = probe
        self._flush = flush
        self._cached = cached
        self._adapters = adapters or NoAdapters()

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to `server`."""
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    async def Info(
        self,
        request: worker_pb2.InfoRequest,
        context: grpc.aio.ServicerContext[worker_pb2.InfoRequest, worker_pb2.InfoResponse],
    ) -> worker_pb2.InfoResponse:
        """The description of now, without the step rates if the client has them."""
        info = self._describe()
        if request.known_epoch == info.epoch:
            info = msgspec.structs.replace(info, rates=None)
        return convert.info_to_pb(info)

    async def Cached(
        self,
        request: worker_pb2.CachedRequest,
        context: grpc.aio.ServicerContext[worker_pb2.CachedRequest, worker_pb2.CachedResponse],
    ) -> AsyncIterator[worker_pb2.CachedResponse]:
        """All that the cache holds, then what changes, until the asker or the worker leaves."""
        number: int | None = None
        while True:
            if (news := self._cached(number)) is not None:
                number = news.until
                yield convert.news_to_pb(news)
            await asyncio.sleep(CACHED_S)

    async def ProbeLinks(
        self,
        request: worker_pb2.ProbeLinksRequest,
        context: grpc.aio.ServicerContext[worker_pb2.ProbeLinksRequest, worker_pb2.ProbeLinksResponse],
    ) -> worker_pb2.ProbeLinksResponse:
        """How the owner's pages come here. Raises what keeps the owner from being asked."""
        links = await self._probe(request.owner)
        return worker_pb2.ProbeLinksResponse(links=map(link_to_pb, links))

    async def FlushCache(
        self,
        request: worker_pb2.FlushCacheRequest,
        context: grpc.aio.ServicerContext[worker_pb2.FlushCacheRequest, worker_pb2.FlushCacheResponse],
    ) -> worker_pb2.FlushCacheResponse:
        """How many pages the cache had. Raises Busy if requests still run after `wait_s`."""
        if not 0 <= request.wait_s <= MOST_WAIT_S:
            raise InvalidRequest(f"wait_s must be from 0 to {MOST_WAIT_S:g}", param="wait_s")
        return worker_pb2.FlushCacheResponse(pages=await self._flush(request.wait_s))

    async def LoadAdapter(
        self,
        request: worker_pb2.LoadAdapterRequest,
        context: grpc.aio.ServicerContext[worker_pb2.LoadAdapterRequest, worker_pb2.LoadAdapterResponse],
    ) -> worker_pb2.LoadAdapterResponse:
        """The adapter as it was read. Raises what is wrong with its folder."""
        loaded = await self._adapters.load(convert.adapter_from_pb(request.adapter))
        return worker_pb2.LoadAdapterResponse(adapter=convert.adapter_to_pb(loaded))

    async def SetAdapters(
        self,
        request: worker_pb2.SetAdaptersRequest,
        context: grpc.aio.ServicerContext[worker_pb2.SetAdaptersRequest, worker_pb2.SetAdaptersResponse],
    ) -> worker_pb2.SetAdaptersResponse:
        """Takes the roster. Raises Busy for an old one, and what is wrong with a folder that it lacks."""
        await self._adapters.set(convert.roster_from_pb(request.adapters))
        return worker_pb2.SetAdaptersResponse()
