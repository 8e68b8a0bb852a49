"""`PrefillService`: one server stream per prompt, which reports that it is admitted, has started, is done.

It translates messages; the engine queues and computes prompts and offers their pages. A stream that ends
early cancels its prompt, and `Cancel` ends a stream early.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc
import msgspec

from eyas.common.errors import Cancelled
from eyas.common.logging import log_request
from eyas.common.wire import convert
from eyas.common.wire.buffer import StreamBuffer
from eyas.common.wire.message import WireFailure
from eyas.engine.ipc.client import EngineClient, engine_id
from eyas.engine.ipc.messages import (
    CancelGeneration,
    EngineStopped,
    Event,
    PrefillDone,
    PrefillPrompt,
    PrefillStarted,
    RequestAdmitted,
    RequestFailed,
    RequestRejected,
)
from protos import prefill_pb2, prefill_pb2_grpc

SERVICE = "eyas.internal.v1.PrefillService"
MAX_BUFFERED = 8  # events; a prompt has three

_log = logging.getLogger("eyas.prefill")

Context: TypeAlias = grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):  # type: ignore[misc]
    """The service over one engine, which it does not own."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._open: dict[tuple[str, int], StreamBuffer[Event]] = {}  # by the caller's id, and attempt

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to `server`."""
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Streams admitted, started, done. Raises the engine's error if it rejects the prompt or fails;
        DeadlineExceeded.
        """
        generation = convert.request_from_pb(request.request, self._engine.context_length)
        log_request(_log, generation, request.attempt)
        deadline = asyncio.get_running_loop().time() + generation.timeout_s
        buffer: StreamBuffer[Event] = StreamBuffer(MAX_BUFFERED, deadline)
        number, prompt = self._engine.open(buffer.put), (generation.id, request.attempt)
        self._open[prompt] = buffer
        generation = msgspec.structs.replace(generation, id=engine_id(number, generation.id))
        done = False
        try:
            self._engine.send(PrefillPrompt(generation, request.attempt, request.offer_draft))
            while not done:
                event = await buffer.get()
                yield _to_pb(event)
                done = not isinstance(event, RequestAdmitted | PrefillStarted)  # after the caller took it
        finally:
            self._engine.close(number)
            if self._open.get(prompt) is buffer:
                del self._open[prompt]
            if not done:
                self._engine.send(CancelGeneration(generation.id))

    async def Cancel(
        self, request: prefill_pb2.CancelRequest, context: Context
    ) -> prefill_pb2.CancelResponse:
        """Ends the prompt's stream after its queued events. Does nothing if it has ended."""
        if (buffer := self._open.get((request.id, request.attempt))) is not None:
            buffer.end(Cancelled("the caller has left"))
        return prefill_pb2.CancelResponse()


def _to_pb(event: Event) -> prefill_pb2.PrefillResponse:
    """Converts an event of a prompt. Raises the error of a rejection, a failure or a stopped engine."""
    match event:
        case RequestAdmitted():
            return prefill_pb2.PrefillResponse(admitted=prefill_pb2.PrefillAdmitted())
        case PrefillStarted(handles=handles):
            started = prefill_pb2.PrefillStarted(handles=[convert.handle_to_pb(h) for h in handles])
            return prefill_pb2.PrefillResponse(started=started)
        case PrefillDone(choices=choices, timings=timings):
            done = prefill_pb2.PrefillDone(
                choices=[convert.first_token_to_pb(first) for first in choices],
                timings=convert.timings_to_pb(timings),
            )
            return prefill_pb2.PrefillResponse(done=done)
        case (
            RequestRejected(failure=failure)
            | RequestFailed(failure=failure)
            | EngineStopped(failure=WireFailure() as failure)
        ):
            raise failure.error()
    raise TypeError(f"the stream of a prompt cannot carry {type(event).__name__}")
