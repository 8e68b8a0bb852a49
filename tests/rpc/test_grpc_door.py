"""The gateway's gRPC server and callers without a key, with too much, too many, or with nothing to say."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.client import AsyncClient
from eyas.common.config import GatewayConfig
from eyas.common.errors import (
    ContextLengthExceeded,
    EyasError,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    RequestTimeout,
    Unauthorized,
    Unavailable,
)
from eyas.common.wire import rpc
from gateway.grpc import front as grpc_front
from gateway.grpc.front import GrpcFront
from gateway.limits.keys import KeyRing
from gateway.observe.metrics import GatewayMetrics
from protos import eyas_pb2
from tests.rpc.keyed_front import CONFIG, GENERATE, KEY, SOON_S, served

KEYS = KeyRing(CONFIG)


def silent(
    channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = ()
) -> grpc.aio.StreamStreamCall:
    """A call of Generate that keeps its message back."""
    return channel.stream_stream(GENERATE)(metadata=metadata, timeout=SOON_S)


async def fate(call: grpc.aio.Call) -> EyasError:
    """What a call ends with. (A server that waits for more lets it end with the client's own deadline.)"""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return rpc.map_rpc_error(caught.value)


async def test_the_key_is_checked_before_the_message_is_read() -> None:
    async with served() as (channel, backend):
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            assert type(await fate(silent(channel, metadata))) is Unauthorized
        huge = channel.unary_stream(GENERATE)(bytes(3 * 2**20), timeout=SOON_S)
        assert type(await fate(huge)) is Unauthorized
        assert backend.requests == []


async def test_a_call_is_made_in_the_name_of_its_key() -> None:
    async with served() as (channel, backend):
        for given in ({"authorization": "Bearer sesame"}, {"x-api-key": "open"}):
            call = channel.unary_stream(GENERATE)(b"\x12\x01x", metadata=tuple(given.items()), timeout=SOON_S)
            await call.read()
            assert backend.requests[-1].caller == KEYS.caller(given).name
        assert len({request.caller for request in backend.requests}) == 2


async def test_a_message_is_bounded_in_size_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.common.wire.rpc.MESSAGE_TIMEOUT_S", 0.3)
    async with served() as (channel, backend):
        generate = channel.unary_stream(GENERATE)
        assert type(await fate(generate(bytes(5000), metadata=KEY, timeout=SOON_S))) is PayloadTooLarge
        assert type(await fate(silent(channel, KEY))) is RequestTimeout
        assert type(await fate(generate(b"\xff" * 9, metadata=KEY, timeout=SOON_S))) is InvalidRequest
        ended = silent(channel, KEY)
        await ended.done_writing()
        assert type(await fate(ended)) is InvalidRequest
        assert backend.requests == []


async def test_others_are_answered_while_a_chat_of_many_messages_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered, chat_of = threading.Event(), grpc_front.chat_of

    def slowly(request: eyas_pb2.ChatRequest) -> Any:
        assert answered.wait(10), "the event loop waits"
        return chat_of(request)

    monkeypatch.setattr(grpc_front, "chat_of", slowly)
    monkeypatch.setattr(grpc_front, "MANY_MESSAGES", 2)
    message = eyas_pb2.ChatMessage(role=eyas_pb2.CHAT_ROLE_USER, content="x")
    chat = eyas_pb2.ChatRequest(messages=[message, message]).SerializeToString()
    async with served() as (channel, _):
        reading = channel.unary_stream("/eyas.v1.Eyas/Chat")(chat, metadata=KEY, timeout=SOON_S)
        await asyncio.sleep(0.1)
        await channel.unary_unary("/eyas.v1.Eyas/Models")(b"", metadata=KEY, timeout=5)
        answered.set()
        assert await reading.read()


async def test_ids_are_counted_before_they_are_looked_at() -> None:
    async with served() as (channel, backend):
        ids = b"\xff\xff\xff\xff\x07" * 129  # each beyond the vocabulary
        message = b"\x1a\x88\x05" + b"\x0a\x85\x05" + ids
        call = channel.unary_stream(GENERATE)(message, metadata=KEY, timeout=SOON_S)
        assert type(await fate(call)) is ContextLengthExceeded
        assert backend.requests == []


async def test_calls_are_bounded_and_health_is_not_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.grpc.admission.MAX_CALLS", 2)
    monkeypatch.setattr("gateway.grpc.admission.MAX_PUBLIC_CALLS", 1)
    async with served(replace(CONFIG, api_keys=())) as (channel, backend):
        backend.pause_s = 0.5  # a second pair of tokens comes late
        held = [silent(channel, KEY) for _ in range(2)]
        for call in held:
            await call.write(b"\x12\x01x")  # text: "x"
            await call.read()
        assert type(await fate(silent(channel, KEY))) is Overloaded
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        held[0].cancel()
        serving = health_pb2.HealthCheckResponse.SERVING
        asked = await health.Check(health_pb2.HealthCheckRequest(), timeout=SOON_S)
        assert asked.status == serving, "watchers keep no other caller from an answer"
        assert type(await fate(watch)) is Overloaded
        assert (await health.Watch(health_pb2.HealthCheckRequest(), timeout=SOON_S).read()).status == serving
        async with asyncio.timeout(SOON_S):
            while not backend.streams[0].closed.is_set():
                await asyncio.sleep(0.01)
        free = silent(channel, KEY)
        await free.write(b"\x12\x01x")
        assert await free.read()


async def test_one_key_has_half_of_the_calls_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their messages need not even have come: a key is told in the header."""
    monkeypatch.setattr("gateway.grpc.admission.MAX_CALLS", 5)
    async with served() as (channel, backend):
        backend.pause_s = 0.5  # a second pair of tokens comes late
        held = [silent(channel, KEY) for _ in range(2)]
        for call in held:
            await call.write(b"\x12\x01x")
            await call.read()
        refused = await fate(silent(channel, KEY))
        assert type(refused) is Overloaded and "2 calls of this key" in refused.message
        other = silent(channel, (("authorization", "Bearer sesame"),))
        await other.write(b"\x12\x01x")
        assert await other.read()
        for call in (*held, other):
            call.cancel()
        async with asyncio.timeout(SOON_S):
            while True:  # the server may not have seen yet that they are gone
                with contextlib.suppress(grpc.aio.AioRpcError):
                    free = silent(channel, KEY)
                    await free.write(b"\x12\x01x")
                    assert await free.read()
                    break


async def test_connections_are_bounded() -> None:
    config = GatewayConfig(grpc_port=0, max_connections=2)
    backend = ScriptedBackend(nano_tokenizer())
    front = GrpcFront(config, backend, backend.tokenizer, GatewayMetrics(CollectorRegistry()))
    await front.start()
    try:
        closed = 0
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
                stack.callback(lambda writer=writer: writer.transport.abort())
                with contextlib.suppress(TimeoutError, ConnectionError):
                    closed += not await asyncio.wait_for(reader.read(1), SOON_S)
        assert closed == 2
        async with AsyncClient(f"127.0.0.1:{front.port}") as client, asyncio.timeout(SOON_S):
            while True:  # the server may not have seen yet that they are gone
                with contextlib.suppress(Unavailable):
                    assert await client.models(timeout_s=SOON_S)
                    break
    finally:
        await front.aclose()


@contextlib.contextmanager
def garbage() -> Iterator[list[object]]:
    """What nothing but a garbage collection frees, of all that is let go inside."""
    gc.collect()
    gc.disable()
    found: list[object] = []
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def test_a_refused_call_leaves_nothing_for_the_garbage_collection() -> None:
    async with served() as (channel, _):
        generate = channel.unary_stream(GENERATE)
        await fate(generate(b"\x12\x01x", timeout=SOON_S))
        with garbage() as found:
            for message, metadata in ((b"", ()), (b"", KEY), (b"\xff" * 9, KEY), (b"\x12\x00" * 999, KEY)):
                await fate(generate(message, metadata=metadata, timeout=SOON_S))
            await asyncio.sleep(0.1)
        assert not {"RPCState", "_ServicerContext"} & {type(each).__name__ for each in found}
