"""`TransferService`: what pullers of this worker's pages are told. Leases are the engine's; this relays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import grpc

from eyas.common import convert
from eyas.common.buffer import StreamBuffer
from eyas.common.errors import NotFound, from_code
from eyas.engine.client import EngineClient
from eyas.engine.messages import Event, Release, Released, Stopped, WatchClosed, WatchOpened, WatchUpdate
from protos import transfer_pb2, transfer_pb2_grpc

SERVICE = "eyas.v1.TransferService"
MAX_BUFFERED = 1024  # updates; one a prefill step
RELEASE_S = 4.0


class TransferServicer(transfer_pb2_grpc.TransferServiceServicer):
    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def register(self, server: grpc.aio.Server) -> None:
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(self, server)

    async def Handshake(
        self, request: transfer_pb2.HandshakeRequest, context: grpc.aio.ServicerContext
    ) -> transfer_pb2.HandshakeReply:
        """What this worker's pages of a group mean, for the puller to compare with its own."""
        self._engine.check()
        ready = self._engine.ready
        group = convert.group_from_pb(request.group)
        if group not in ready.meanings:
            raise NotFound(f"this worker has no pages of the {group} group", param="group")
        geometry = json.dumps(json.loads(ready.geometry)[group])
        return transfer_pb2.HandshakeReply(
            meaning=ready.meanings[group], epoch=ready.epoch, geometry=geometry
        )

    async def Watch(
        self, request: transfer_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[transfer_pb2.WatchEvent]:
        """Stays open after `done`: the lease lives as long as the puller listens."""
        buffer: StreamBuffer[Event] = StreamBuffer(MAX_BUFFERED)
        number = self._engine.open(buffer.put)
        handle = request.handle
        self._engine.send(WatchOpened(number, handle.id, handle.epoch, request.attempt))
        try:
            while True:
                event = await buffer.get()
                if isinstance(event, Stopped):
                    raise from_code(event.failure.code, event.failure.message)
                for message in _to_pb(event):
                    yield message
                if event.failure is not None:
                    return
        finally:
            self._engine.close(number)
            self._engine.send(WatchClosed(number))

    async def Release(
        self, request: transfer_pb2.ReleaseRequest, context: grpc.aio.ServicerContext
    ) -> transfer_pb2.ReleaseReply:
        deadline = asyncio.get_running_loop().time() + RELEASE_S
        buffer: StreamBuffer[Event] = StreamBuffer(2, deadline)
        number = self._engine.open(buffer.put)
        try:
            self._engine.send(Release(number, request.id, request.epoch, request.attempt))
            event = await buffer.get()
        finally:
            self._engine.close(number)
        return transfer_pb2.ReleaseReply(valid=isinstance(event, Released) and event.valid)


def _to_pb(update: WatchUpdate) -> list[transfer_pb2.WatchEvent]:
    messages = []
    if update.tokens:
        ready = transfer_pb2.WatchReady(tokens=update.tokens)
        messages.append(transfer_pb2.WatchEvent(ready=ready))
    if update.done:
        choices = [convert.first_token_to_pb(first) for first in update.choices]
        done = transfer_pb2.WatchDone(choices=choices, last_feature=update.last_feature)
        messages.append(transfer_pb2.WatchEvent(done=done))
    if update.failure is not None:
        error = from_code(update.failure.code, update.failure.message)
        failed = transfer_pb2.WatchFailed(status=convert.error_to_pb(error))
        messages.append(transfer_pb2.WatchEvent(failed=failed))
    return messages
