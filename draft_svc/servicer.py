"""`DraftService`: one Session connects one decode engine to this worker's drafter.

It translates batches both ways and numbers the decode engines; sequences and proposals are the engine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc
from msgspec.structs import asdict

from eyas.common.wire import convert, rpc
from eyas.common.wire.buffer import StreamBuffer
from eyas.common.wire.convert import params_from_pb
from eyas.common.wire.message import WireFailure
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import (
    DraftChannel,
    DraftClose,
    DraftCommit,
    DraftDown,
    DraftOpen,
    DraftPeerGone,
    DraftUp,
    EngineStopped,
)
from protos import draft_pb2, draft_pb2_grpc

SERVICE = "eyas.internal.v1.DraftService"
MAX_BUFFERED = 256  # batches that a decode engine has not read yet

Context: TypeAlias = grpc.aio.ServicerContext[
    draft_pb2.DraftServiceSessionRequest, draft_pb2.DraftServiceSessionResponse
]


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):  # type: ignore[misc]
    """The service over one engine, which it does not own."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to `server`."""
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)

    async def Session(
        self, request_iterator: AsyncIterator[draft_pb2.DraftServiceSessionRequest], context: Context
    ) -> AsyncIterator[draft_pb2.DraftServiceSessionResponse]:
        """Streams proposals and closed sequences, until the decode engine ends its side.

        Raises this engine's error if it stops, and Overloaded if the decode engine reads too slowly.
        """
        buffer: StreamBuffer[DraftDown | EngineStopped | None] = StreamBuffer(MAX_BUFFERED)
        peer = self._engine.open(buffer.put)
        reader = asyncio.create_task(self._read(request_iterator, peer, buffer))
        try:
            # The decode worker considers the drafter down until it receives these headers.
            await context.send_initial_metadata(((rpc.PEER, str(peer)),))
            while (event := await buffer.get()) is not None:
                match event:
                    case DraftDown():
                        yield _down_to_pb(event)
                    case EngineStopped(failure=WireFailure() as failure):
                        raise failure.error()
        finally:
            reader.cancel()
            self._engine.close(peer)
            self._engine.send(DraftPeerGone(peer))

    async def _read(
        self,
        messages: AsyncIterator[draft_pb2.DraftServiceSessionRequest],
        peer: int,
        buffer: StreamBuffer[DraftDown | EngineStopped | None],
    ) -> None:
        try:
            async for message in messages:
                self._engine.send(_up_from_pb(message, peer))
            buffer.put(None)
        except Exception as error:
            buffer.end(error)  # raised again by the stream, where the interceptor maps it


def _up_from_pb(pb: draft_pb2.DraftServiceSessionRequest, peer: int) -> DraftUp:
    return DraftUp(
        opens=tuple(_open_from_pb(o) for o in pb.opens),
        commits=tuple(_commit_from_pb(c) for c in pb.commits),
        closes=tuple(DraftClose(c.seq, c.generation) for c in pb.closes),
        channel=_channel_from_pb(pb.channel) if pb.HasField("channel") else None,
        peer=peer,
    )


def _channel_from_pb(pb: draft_pb2.DraftChannel) -> DraftChannel:
    return DraftChannel(
        export=dict(pb.export),
        width=pb.width,
        nodes=pb.nodes,
        places=pb.places,
        rows=pb.rows,
        gpu=pb.gpu,
        dtype=pb.dtype,
    )


def _open_from_pb(pb: draft_pb2.DraftOpen) -> DraftOpen:
    return DraftOpen(
        seq=pb.seq,
        generation=pb.generation,
        base_len=pb.base_len,
        params=params_from_pb(pb.params),
        choice=pb.choice,
        handle=convert.handle_from_pb(pb.handle) if pb.HasField("handle") else None,
        attempt=pb.attempt,
        place=pb.place if pb.HasField("place") else -1,
        steps=pb.steps,
    )


def _commit_from_pb(pb: draft_pb2.DraftCommit) -> DraftCommit:
    return DraftCommit(
        seq=pb.seq,
        generation=pb.generation,
        base_len=pb.base_len,
        tokens=tuple(pb.tokens),
        features=pb.features,
        steps=pb.steps,
        topk=pb.topk,
        draft_tokens=pb.draft_tokens,
        lent=pb.lent,
    )


def _down_to_pb(down: DraftDown) -> draft_pb2.DraftServiceSessionResponse:
    return draft_pb2.DraftServiceSessionResponse(
        proposals=[draft_pb2.Proposal(**asdict(proposal)) for proposal in down.proposals],
        closed=[draft_pb2.DraftClosed(**asdict(closed)) for closed in down.closed],
        no_channel=down.no_channel,
    )
