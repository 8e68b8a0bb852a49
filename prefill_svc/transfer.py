"""`TransferService`: what pullers of this worker's pages are told, and bytes for those who share no memory.

Leases are the engine's; this relays. It reads the engine's pools and never judges whether a read was in time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from eyas.common import chunk, convert
from eyas.common.buffer import StreamBuffer
from eyas.common.errors import InvalidRequest, NotFound, TransferFailed, from_code
from eyas.common.types import KvHandle, KvKind
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import Event, Release, Released, Stopped, WatchClosed, WatchOpened, WatchUpdate
from kv_transfer.backends.base import Pages
from kv_transfer.backends.shm import map_pool
from kv_transfer.backends.stream import chunks
from kv_transfer.layout import Geometry
from kv_transfer.route import pool_identity
from protos import transfer_pb2, transfer_pb2_grpc

SERVICE = "eyas.internal.v1.TransferService"
MAX_BUFFERED = 1024  # updates; one a prefill step
RELEASE_S = 4.0


@dataclass(frozen=True)
class _Watch:
    handle: KvHandle
    attempt: int


class TransferServicer(transfer_pb2_grpc.TransferServiceServicer):
    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._watches: dict[int, _Watch] = {}  # accepted by the engine and not released, by stream number
        self._pools: dict[KvKind, Pages] = {}  # mapped when the first puller needs it

    def register(self, server: grpc.aio.Server) -> None:
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(self, server)
        fetch = grpc.unary_stream_rpc_method_handler(
            self.Fetch, transfer_pb2.FetchRequest.FromString, chunk.encode
        )
        server.add_registered_method_handlers(SERVICE, {"Fetch": fetch})  # in place of the generated one

    async def Handshake(
        self, request: transfer_pb2.HandshakeRequest, context: grpc.aio.ServicerContext
    ) -> transfer_pb2.HandshakeResponse:
        """What this worker's pages of a group mean, for the puller to compare with its own."""
        self._engine.check()
        ready = self._engine.ready
        group = convert.group_from_pb(request.group)
        if group not in ready.layout_hashes:
            raise NotFound(f"this worker has no pages of the {group} group", param="group")
        return transfer_pb2.HandshakeResponse(
            layout_hash=ready.layout_hashes[group],
            epoch=ready.epoch,
            geometry=self._geometry(group),
            pool_identity=pool_identity(ready.pools[group]) if group in ready.pools else "",
        )

    async def Watch(
        self, request: transfer_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[transfer_pb2.WatchResponse]:
        """Stays open after `done`: the lease lives as long as the puller listens."""
        watch = _Watch(convert.handle_from_pb(request.handle), request.attempt)
        buffer: StreamBuffer[Event] = StreamBuffer(MAX_BUFFERED)
        number = self._engine.open(buffer.put)
        self._engine.send(WatchOpened(number, watch.handle, watch.attempt))
        accepted = False
        try:
            while True:
                event = await buffer.get()
                if isinstance(event, Stopped):
                    raise from_code(event.failure.code, event.failure.message)
                if event.failure is None and not accepted:
                    accepted, self._watches[number] = True, watch
                for message in _to_pb(event):
                    yield message
                if event.failure is not None:
                    return
        finally:
            self._watches.pop(number, None)
            self._engine.close(number)
            self._engine.send(WatchClosed(number))

    async def Release(
        self, request: transfer_pb2.ReleaseRequest, context: grpc.aio.ServicerContext
    ) -> transfer_pb2.ReleaseResponse:
        self._forget(request)
        deadline = asyncio.get_running_loop().time() + RELEASE_S
        buffer: StreamBuffer[Event] = StreamBuffer(2, deadline)
        number = self._engine.open(buffer.put)
        try:
            self._engine.send(Release(number, request.id, request.epoch, request.attempt))
            event = await buffer.get()
        finally:
            self._engine.close(number)
        return transfer_pb2.ReleaseResponse(valid=isinstance(event, Released) and event.valid)

    async def Fetch(
        self, request: transfer_pb2.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """Pages of a handle that is being watched, as they are now; Release says what that was worth.

        None is read once the Watch has ended or a Release has come: it may hold another request's KV by then.
        """
        self._engine.check()
        handle = self._watched(request)
        offered = {page for shard in handle.shards for page in shard.pages}
        if len(request.pages) > len(offered) or not offered.issuperset(request.pages):
            message = f"pages has numbers that handle {handle.id} of the {handle.group} group does not name"
            raise InvalidRequest(message, param="pages")
        for data in chunks(self._pool(handle.group), request.pages):
            yield data
            self._watched(request)

    def _forget(self, release: transfer_pb2.ReleaseRequest) -> None:
        """Before the engine hears of it, which may write to the pages at once."""
        for number, watch in list(self._watches.items()):
            named = (watch.handle.id, watch.handle.epoch) == (release.id, release.epoch)
            if named and watch.attempt <= release.attempt:
                del self._watches[number]

    def _watched(self, request: transfer_pb2.FetchRequest) -> KvHandle:
        """The handle that is to be read, as it was offered."""
        named = (request.id, request.epoch, convert.group_from_pb(request.group), request.attempt)
        for watch in self._watches.values():
            handle = watch.handle
            if (handle.id, handle.epoch, handle.group, watch.attempt) == named:
                return handle
        raise TransferFailed(f"no Watch of handle {request.id} by attempt {request.attempt} is open here")

    def _pool(self, group: KvKind) -> Pages:
        if group not in self._pools:
            pools = self._engine.ready.pools
            if group not in pools:
                raise NotFound(f"this worker has no pool of the {group} group in a file", param="group")
            geometry = Geometry.from_json(self._geometry(group))
            self._pools[group] = map_pool(pools[group], geometry.page_bytes).pages
        return self._pools[group]

    def _geometry(self, group: KvKind) -> str:
        return json.dumps(json.loads(self._engine.ready.geometry)[group])


def _to_pb(update: WatchUpdate) -> list[transfer_pb2.WatchResponse]:
    messages = []
    if update.tokens:
        ready = transfer_pb2.WatchReady(tokens=update.tokens)
        messages.append(transfer_pb2.WatchResponse(ready=ready))
    if update.done:
        choices = [convert.first_token_to_pb(first) for first in update.choices]
        done = transfer_pb2.WatchDone(choices=choices, last_feature=update.last_feature)
        messages.append(transfer_pb2.WatchResponse(done=done))
    if update.failure is not None:
        error = from_code(update.failure.code, update.failure.message)
        failed = transfer_pb2.WatchFailed(status=convert.error_to_pb(error))
        messages.append(transfer_pb2.WatchResponse(failed=failed))
    return messages
