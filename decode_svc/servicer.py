"""`DecodeService`: one Session carries every request between a gateway and this worker.

It translates messages and remembers which requests are unfinished, so that a Session's end cancels them.
Queues, pages and tokens are the engine's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

import grpc
import msgspec

from eyas.common.errors import EyasError, InvalidRequest, Overloaded, Unavailable
from eyas.common.logging import log_request
from eyas.common.types import TokenEntry, WorkerInfo
from eyas.common.wire import convert
from eyas.common.wire.buffer import StreamBuffer
from eyas.common.wire.convert_step import step_to_pb
from eyas.common.wire.message import WireFailure
from eyas.engine.ipc.client import EngineClient, engine_id, wire_id
from eyas.engine.ipc.messages import (
    AttachKv,
    CancelGeneration,
    EngineStopped,
    Event,
    PagesLost,
    RequestAdmitted,
    RequestFailed,
    RequestRejected,
    StepReply,
    SubmitGeneration,
)
from protos import decode_pb2, decode_pb2_grpc

SERVICE = "eyas.internal.v1.DecodeService"
HEARTBEAT_S = 1.0
MAX_BUFFERED = 1024  # messages that a gateway has not read yet
MAX_REQUESTS = 4096  # unfinished in one Session

_log = logging.getLogger("eyas.decode")

Context: TypeAlias = grpc.aio.ServicerContext[
    decode_pb2.DecodeServiceSessionRequest, decode_pb2.DecodeServiceSessionResponse
]


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):  # type: ignore[misc]
    """The service over one engine. `describe` gives the load figures that heartbeats carry."""

    def __init__(self, engine: EngineClient, describe: Callable[[], WorkerInfo]) -> None:
        self._engine = engine
        self._describe = describe

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to `server`."""
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    async def Session(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeServiceSessionRequest], context: Context
    ) -> AsyncIterator[decode_pb2.DecodeServiceSessionResponse]:
        """Streams heartbeats, and the engine's events for the requests that the gateway submits.

        The end of the stream cancels them. Raises InvalidRequest for a message of an unknown kind, Overloaded
        if the gateway reads too slowly, and the engine's error if it stops.
        """
        session = _DecodeStream(self._engine, self._describe)
        tasks = [
            asyncio.create_task(session.read(request_iterator)),
            asyncio.create_task(session.beat()),
        ]
        try:
            while (message := await session.buffer.get()) is not None:
                yield message
        finally:
            for task in tasks:
                task.cancel()
            session.close()


class _DecodeStream:
    """The requests of one stream. `buffer` holds the messages to the gateway; None in it ends the stream."""

    def __init__(self, engine: EngineClient, describe: Callable[[], WorkerInfo]) -> None:
        self._engine = engine
        self._describe = describe
        self._number = engine.open(self._on_event)
        self._alive: dict[str, set[int]] = {}  # engine id -> unfinished choices
        self._ended: dict[str, None] = {}  # ids of ended requests, oldest first
        self.buffer: StreamBuffer[decode_pb2.DecodeServiceSessionResponse | None] = StreamBuffer(MAX_BUFFERED)

    def close(self) -> None:
        self._engine.close(self._number)
        if self._alive:
            self._engine.send(*(CancelGeneration(id) for id in self._alive))

    # --- up -------------------------------------------------------------------------------------------

    async def read(self, messages: AsyncIterator[decode_pb2.DecodeServiceSessionRequest]) -> None:
        try:
            async for message in messages:
                self._on_message(message)
            self.buffer.put(None)
        except Exception as error:
            self.buffer.end(error)  # raised again by the stream, where the interceptor maps it

    def _on_message(self, message: decode_pb2.DecodeServiceSessionRequest) -> None:
        match message.WhichOneof("message"):
            case "submit":
                self._submit(message.submit)
            case "attach":
                self._attach(message.attach)
            case "cancel":
                cancel = message.cancel
                choice = cancel.choice if cancel.HasField("choice") else None
                self._forget(self._id(cancel.id), choice)
                self._engine.send(CancelGeneration(self._id(cancel.id), choice))
            case _:
                raise InvalidRequest("the Session got a message of an unknown kind", param="message")

    def _submit(self, submit: decode_pb2.Submit) -> None:
        try:
            request = convert.request_from_pb(submit.request, self._engine.context_length)
        except (InvalidRequest, Unavailable) as error:
            self._put_beat()  # before the rejection, so that the gateway knows why: the worker may be late
            self._reject(submit.request.id, submit.attempt, error)
            return
        id = self._id(request.id)
        if len(self._alive) >= MAX_REQUESTS:
            full = Overloaded(f"the Session carries {MAX_REQUESTS} requests already")
            self._reject(request.id, submit.attempt, full)
            self._end(id)
            return
        self._alive[id] = {choice.index for choice in request.choices}
        attach = submit.source == decode_pb2.SOURCE_ATTACH
        log_request(_log, request, submit.attempt)
        self._engine.send(SubmitGeneration(msgspec.structs.replace(request, id=id), submit.attempt, attach))

    def _attach(self, attach: decode_pb2.Attach) -> None:
        """Forwards handles to the engine, for requests of this Session only. The engine releases the handles
        of requests that have ended.
        """
        id = self._id(attach.id)
        if id in self._alive or id in self._ended:
            try:
                handles = convert.handles_from_pb(attach.handles)
                first_tokens = convert.first_tokens_from_pb(attach.first_tokens)
            except InvalidRequest as error:  # as from a newer gateway: its other requests continue
                self._fail(attach, error)
            else:
                self._engine.send(AttachKv(id, attach.attempt, handles, first_tokens))

    def _fail(self, attach: decode_pb2.Attach, error: EyasError) -> None:
        """Cancels a request whose handles are invalid, and reports it failed to the gateway."""
        id = self._id(attach.id)
        if id in self._alive:
            self._forget(id, None)
            self._engine.send(CancelGeneration(id))
            status = convert.error_to_pb(error)
            failed = decode_pb2.Failed(id=attach.id, attempt=attach.attempt, status=status)
            self.buffer.put(decode_pb2.DecodeServiceSessionResponse(failed=failed))

    def _id(self, id: str) -> str:
        return engine_id(self._number, id)

    def _forget(self, id: str, choice: int | None) -> None:
        """Records that a choice, or (None) the whole request, has ended."""
        unfinished = self._alive.get(id)
        if unfinished is None:
            return
        unfinished.discard(choice) if choice is not None else unfinished.clear()
        if not unfinished:
            del self._alive[id]
            self._end(id)

    def _end(self, id: str) -> None:
        self._ended[id] = None
        if len(self._ended) > MAX_REQUESTS:
            del self._ended[next(iter(self._ended))]

    # --- down -----------------------------------------------------------------------------------------

    async def beat(self) -> None:
        try:
            while True:
                self._put_beat()
                await asyncio.sleep(HEARTBEAT_S)
        except Exception as error:
            self.buffer.end(error)  # without heartbeats, the gateway would consider the worker dead

    def _put_beat(self) -> None:
        beat = _heartbeat(self._describe())
        self.buffer.put(decode_pb2.DecodeServiceSessionResponse(heartbeat=beat))

    def _reject(self, id: str, attempt: int, error: EyasError) -> None:
        rejected = decode_pb2.Rejected(id=id, attempt=attempt, status=convert.error_to_pb(error))
        self.buffer.put(decode_pb2.DecodeServiceSessionResponse(rejected=rejected))

    def _on_event(self, event: Event) -> None:
        match event:
            case StepReply(entries):
                self.buffer.put(self._step(entries))
            case RequestAdmitted(id, attempt):
                admitted = decode_pb2.Admitted(id=wire_id(id), attempt=attempt)
                self.buffer.put(decode_pb2.DecodeServiceSessionResponse(admitted=admitted))
            case RequestRejected(id, attempt, failure):
                self._forget(id, None)
                self._reject(wire_id(id), attempt, failure.error())
            case PagesLost(id, attempt):
                self.buffer.put(
                    decode_pb2.DecodeServiceSessionResponse(
                        lost=decode_pb2.Lost(id=wire_id(id), attempt=attempt)
                    )
                )
            case RequestFailed(id, attempt, failure, choice):
                self._forget(id, choice)
                status = convert.error_to_pb(failure.error())
                failed = decode_pb2.Failed(id=wire_id(id), attempt=attempt, choice=choice, status=status)
                self.buffer.put(decode_pb2.DecodeServiceSessionResponse(failed=failed))
            case EngineStopped(WireFailure() as failure):
                self.buffer.end(failure.error())

    def _step(self, entries: tuple[TokenEntry, ...]) -> decode_pb2.DecodeServiceSessionResponse:
        for entry in entries:
            if entry.finish is not None:
                self._forget(entry.id, entry.choice)
        return decode_pb2.DecodeServiceSessionResponse(step=step_to_pb(entries, wire_id))


def _heartbeat(info: WorkerInfo) -> decode_pb2.Heartbeat:
    comes_back = info.stalled or info.weights.closed or bool(info.released)
    return decode_pb2.Heartbeat(
        running=info.running,
        waiting=info.waiting,
        pages_used=info.pages_used,
        pages_total=info.pages_total,
        draining=not (info.serving or comes_back),
        late=info.stalled,
    )
