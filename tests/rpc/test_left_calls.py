"""A gRPC call whose caller leaves ends at once and in its own task, even while a message is being sent."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from eyas.common.logging import request_id
from eyas.common.wire import rpc

METHOD = "/eyas.test.Long/Speak"
PART = bytes(256 << 10)  # a caller that reads nothing has room for few of them


class Speaker:
    """A handler without an end; notes in which task it begins and ends."""

    def __init__(self) -> None:
        self.said = 0
        self.began_in: asyncio.Task[Any] | None = None
        self.ended_in: asyncio.Task[Any] | None = None
        self.over = asyncio.Event()

    async def speak(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.began_in = asyncio.current_task()
        named = request_id.set("mine")
        try:
            while True:
                self.said += 1
                yield PART
        finally:
            request_id.reset(named)  # raises in another context
            self.ended_in = asyncio.current_task()
            self.over.set()


async def started(speaker: Speaker) -> tuple[grpc.aio.Server, int]:
    server = rpc.server()
    handler = grpc.unary_stream_rpc_method_handler(speaker.speak, bytes, bytes)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("eyas.test.Long", {"Speak": handler})]
    )
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    return server, port


async def until_it_waits(speaker: Speaker) -> None:
    """The server has sent what it may before the caller reads."""
    said = -1
    async with asyncio.timeout(30):
        while speaker.said != said or not said:
            said = speaker.said
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("reads", [0, 3])
async def test_a_call_that_is_left_ends_at_once_in_its_own_task(reads: int) -> None:
    speaker = Speaker()
    server, port = await started(speaker)
    gc.disable()  # nothing may depend on it
    try:
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream(METHOD)(b"")
            for _ in range(reads):
                await call.read()
            await until_it_waits(speaker)
            call.cancel()
            async with asyncio.timeout(30):
                await speaker.over.wait()
    finally:
        gc.enable()
        await server.stop(None)
    assert speaker.ended_in is speaker.began_in is not None


async def test_many_left_calls_leave_nothing_running() -> None:
    speakers = [Speaker() for _ in range(64)]
    waiting = iter(speakers)

    class Each(Speaker):
        async def speak(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
            inner: Any = next(waiting).speak(request, context)
            async with contextlib.aclosing(inner) as parts:
                async for part in parts:
                    yield part

    server, port = await started(Each())
    try:
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            calls = [channel.unary_stream(METHOD)(b"") for _ in speakers]
            await asyncio.gather(*(call.read() for call in calls))
            for call in calls:
                call.cancel()
            async with asyncio.timeout(30):
                await asyncio.gather(*(speaker.over.wait() for speaker in speakers))
            assert all(speaker.ended_in is speaker.began_in for speaker in speakers)
    finally:
        await server.stop(None)
