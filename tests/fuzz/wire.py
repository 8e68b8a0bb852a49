"""Every gRPC method of the protos, and calls to them that say what they like and judge what comes back.

It knows which statuses and words are an answer and which are a crash; what to say is its callers' business.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from protos import decode_pb2, draft_pb2, eyas_pb2, prefill_pb2, transfer_pb2, worker_pb2

FILES = (
    decode_pb2, draft_pb2, eyas_pb2, prefill_pb2, transfer_pb2, worker_pb2, health_pb2, reflection_pb2,
)  # fmt: skip
CALL_S = 2.5
GAP_S = 0.01  # between two messages
CRASHES = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}
OWN_ERROR = "Internal error from Core"  # what gRPC's client says if it still writes when the answer is there
CRASHED = b"internal_error"  # in a status that a message carries

Heard = Callable[[Message], None]


@dataclass(frozen=True)
class Method:
    """One rpc. `takes` and `gives` are classes of messages."""

    path: str
    streams_up: bool
    takes: type[Message]
    gives: type[Message]


def methods() -> dict[str, Method]:
    """Every method of every service, by path."""
    found = {}
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                takes, gives = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
                found[path] = Method(path, method.client_streaming, takes, gives)
    return found


@dataclass(frozen=True)
class Talk:
    """What is said in one call: messages, then silence of `hold_s` before the end of the sending side. After
    `leaves_after` replies the caller hangs up.
    """

    sent: list[bytes]
    hold_s: float = 0.0
    leaves_after: int | None = None


@dataclass
class Wire:
    """`calls` counts (method, status), `replies` (method, field of a reply that was set)."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    replies: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)

    async def aclose(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def call(self, address: str, method: Method, talk: Talk, heard: Heard = lambda _: None) -> None:
        """Says all, hears all (`heard` gets each reply), for at most CALL_S."""
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address)
        call = self._channels[address].stream_stream(method.path)(self._up(talk), timeout=CALL_S)
        status, details = grpc.StatusCode.OK, ""
        try:
            await self._hear(call, method, talk, heard)
        except grpc.aio.AioRpcError as error:
            status, details = error.code(), error.details() or ""
        finally:
            call.cancel()
        self.calls[method.path, status.name] += 1
        if status in CRASHES and details != OWN_ERROR:
            self._blame(method, talk, f"{status.name} {details[:200]!r}")

    async def _up(self, talk: Talk) -> AsyncIterator[bytes]:
        for message in talk.sent:
            yield message
            await asyncio.sleep(GAP_S)
        await asyncio.sleep(talk.hold_s)

    async def _hear(self, call: grpc.aio.StreamStreamCall, method: Method, talk: Talk, heard: Heard) -> None:
        count = 0
        async for raw in call:
            reply = method.gives.FromString(raw)
            self.replies.update((method.path, set_field.name) for set_field, _ in reply.ListFields())
            if CRASHED in raw:
                self._blame(method, talk, repr(raw[:200]))
            heard(reply)
            count += 1
            if count == talk.leaves_after:
                return

    def _blame(self, method: Method, talk: Talk, what: str) -> None:
        said = []
        for raw in talk.sent:
            with contextlib.suppress(Exception):
                said.append(str(method.takes.FromString(raw))[:500])
        self.wrong.append(f"{method.path} -> {what} for {said or [raw[:80] for raw in talk.sent]}")
