"""Callers on their way to gRPC: its limits hold from their first byte, and bytes pass as they came."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from prometheus_client import CollectorRegistry
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.client import AsyncClient
from eyas.common.cluster.listening import listen
from eyas.common.config import GatewayConfig
from gateway.grpc import relay as grpc_relay
from gateway.grpc.admission import AdmissionInterceptor
from gateway.grpc.front import GrpcFront
from gateway.grpc.relay import MAX_BYTES, GrpcRelay
from gateway.observe.metrics import GatewayMetrics
from tests.e2e.attacks.attack import Target
from tests.e2e.attacks.calls import CONTINUATION, HEADERS, PREFACE, SETTINGS, frame, headers, literal

ACK = frame(SETTINGS, 1, 0)
OWN = PREFACE + frame(SETTINGS, 0, 0)
HELLO = b"hello"
SOON_S = 10.0
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def front() -> AsyncIterator[GrpcFront]:
    backend = ScriptedBackend(nano_tokenizer())
    made = GrpcFront(
        GatewayConfig(grpc_port=0), backend, backend.tokenizer, GatewayMetrics(CollectorRegistry())
    )
    await made.start()
    try:
        yield made
    finally:
        await made.aclose()


@contextlib.asynccontextmanager
async def relayed(serve: Serve) -> AsyncIterator[GrpcRelay]:
    """A relay to a server that is not gRPC."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "s")
        async with await asyncio.start_unix_server(serve, path):
            relay = GrpcRelay(listen("127.0.0.1", 0, "grpc-port"), path, None, 1)
            relay.start()
            yield relay
            await relay.stop()


def on_both_loops(test: Callable[[], Any]) -> None:
    """uvloop's, which the gateway has, and asyncio's."""
    for factory in (uvloop.new_event_loop, asyncio.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(test(), 3 * SOON_S))


async def test_a_header_is_bounded_before_its_caller_has_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    admit = AdmissionInterceptor.intercept_service

    async def noted(self: Any, go_on: Any, details: Any) -> Any:
        seen.append(len(details.invocation_metadata))
        return await admit(self, go_on, details)

    monkeypatch.setattr(AdmissionInterceptor, "intercept_service", noted)
    entries = literal("x-a", "b" * 100) * 150
    async with front() as there:
        for frames, end in ((2, True), (50, True), (50, False)):
            reader, writer = await asyncio.open_connection("127.0.0.1", there.port)
            told = headers(Target(0, there.port, "k"))
            writer.write(OWN + frame(HEADERS, 0, 1, told) + frame(CONTINUATION, 0, 1, entries) * frames)
            if end:
                writer.write(frame(CONTINUATION, 4, 1, literal("x-b", "c")))
                async with asyncio.timeout(SOON_S):
                    assert b"grpc-status\x018" in await reader.readuntil(b"grpc-status\x018")
            await asyncio.sleep(0.1)
            writer.transport.abort()
        async with AsyncClient(f"127.0.0.1:{there.port}") as client:
            assert await client.models(timeout_s=SOON_S)
    assert seen and max(seen) < 200


async def test_a_caller_who_never_acknowledges_is_closed() -> None:
    async with front() as there:
        reader, writer = await asyncio.open_connection("127.0.0.1", there.port)
        writer.write(OWN + frame(HEADERS, 0, 1, headers(Target(0, there.port, "k"))))
        part = frame(CONTINUATION, 0, 1, literal("x-a", "b" * 100) * 150)
        with contextlib.suppress(OSError):
            for _ in range(2 * MAX_BYTES // len(part)):
                writer.write(part)
                await writer.drain()
        async with asyncio.timeout(SOON_S):
            with contextlib.suppress(OSError):
                while await reader.read(1 << 16):
                    pass
        writer.transport.abort()


def test_what_comes_early_waits_and_all_passes_in_order() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)  # the caller speaks meanwhile
        assert not reader._buffer  # type: ignore[attr-defined]
        writer.write(HELLO)
        said = await reader.readexactly(len(OWN + ACK) + 300_000)
        writer.write(said)
        writer.close()

    async def test() -> None:
        async with relayed(serve) as relay:
            reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
            body = bytes(range(250)) * 1200
            writer.write(OWN)
            await asyncio.sleep(0.05)
            writer.write(ACK + body)
            async with asyncio.timeout(SOON_S):
                assert await reader.read() == HELLO + OWN + ACK + body
            writer.close()

    on_both_loops(test)


def test_a_slow_end_slows_the_other() -> None:
    """Of 64 MiB, most stays where it is while nothing is read; then all comes."""
    size = 64 << 20
    written = [0]

    async def flood(writer: asyncio.StreamWriter) -> None:
        for _ in range(size >> 16):
            writer.write(bytes(1 << 16))
            written[0] += 1 << 16
            await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO)
        if await reader.readexactly(len(OWN + ACK) + 1) == OWN + ACK + b"d":
            await flood(writer)
        else:
            await asyncio.sleep(0.5)
            writer.write(b"%d" % len(await reader.readexactly(size)))
        writer.close()

    async def test() -> None:
        async with relayed(serve) as relay:
            for way in (b"d", b"u"):
                reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
                await reader.readexactly(len(HELLO))
                written[0] = 0
                writer.write(OWN + ACK + way)
                if way == b"d":
                    await asyncio.sleep(0.5)
                    assert 0 < written[0] < size // 2
                    assert len(await reader.read()) == size
                else:
                    sending = asyncio.create_task(flood(writer))
                    await asyncio.sleep(0.4)
                    assert 0 < written[0] < size // 2
                    await sending
                    assert await reader.read() == b"%d" % size
                writer.close()

    on_both_loops(test)


def test_either_end_that_goes_takes_the_other_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_relay, "FLUSH_S", 0.3)

    async def test() -> None:
        ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(HELLO)
            with contextlib.suppress(OSError):
                if await reader.readexactly(len(OWN + ACK)) and await reader.read(1) == b"x":
                    writer.write(bytes(32 << 20))  # its caller takes nothing of it
                    writer.transport.close()
                    return
            ended.set_result(b"")

        async with relayed(serve) as relay, asyncio.timeout(SOON_S):
            _, writer = await asyncio.open_connection("127.0.0.1", relay.port)
            writer.write(OWN + ACK)
            await asyncio.sleep(0.1)
            writer.transport.abort()
            await ended
            _, writer = await asyncio.open_connection("127.0.0.1", relay.port)
            writer.write(OWN + ACK + b"x")
            await asyncio.sleep(0.2)
            await relay.stop()
            await relay.aclose()
            assert not relay._callers
            writer.transport.abort()

    on_both_loops(test)


def test_who_says_no_more_and_takes_no_more_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the caller is less than what pauses gRPC, so nothing else ends it."""
    monkeypatch.setattr(grpc_relay, "FLUSH_S", 0.3)

    async def test() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(HELLO)
            await reader.readexactly(len(OWN + ACK))
            (end,) = relay._callers
            assert end.transport is not None
            while not end.transport.get_write_buffer_size():
                writer.write(bytes(20_000))
                await asyncio.sleep(0.001)
            caller.shutdown(socket.SHUT_WR)
            await asyncio.sleep(0.1)
            writer.close()

        with socket.socket() as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            async with relayed(serve) as relay, asyncio.timeout(SOON_S):
                caller.connect(("127.0.0.1", relay.port))
                caller.sendall(OWN + ACK)
                while not relay._callers:
                    await asyncio.sleep(0.01)
                while relay._callers:
                    await asyncio.sleep(0.01)

    on_both_loops(test)


def test_a_caller_who_takes_nothing_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_relay, "FLUSH_S", 2 * SOON_S)
    monkeypatch.setattr(grpc_relay, "LAST_S", 0.2, raising=False)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO + bytes(32 << 20))
        writer.close()

    async def test() -> None:
        async with relayed(serve) as relay, asyncio.timeout(SOON_S):
            with socket.create_connection(("127.0.0.1", relay.port)):
                await asyncio.sleep(0.2)
                assert relay._callers
                await relay.stop()
                await relay.aclose()

    on_both_loops(test)


def test_hundreds_of_callers_may_come_at_once() -> None:
    """The kernel keeps them until the loop has time."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def test() -> None:
        async with relayed(serve) as relay:
            await asyncio.sleep(0.05)
            with contextlib.ExitStack() as callers:
                for _ in range(300):  # the loop does not turn meanwhile
                    where = ("127.0.0.1", relay.port)
                    callers.enter_context(socket.create_connection(where, timeout=1.0))

    on_both_loops(test)


async def test_a_gateway_that_is_killed_leaves_no_file_and_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")  # a container's root may be read-only
    async with front() as there, AsyncClient(f"127.0.0.1:{there.port}") as client:
        assert await client.models(timeout_s=SOON_S)
        name = os.readlink(f"/proc/self/fd/{there._socket}")
        assert name.endswith(" (deleted)") and not Path(name).parent.exists()


async def test_without_gRPC_behind_it_a_caller_is_closed() -> None:
    relay = GrpcRelay(listen("127.0.0.1", 0, "grpc-port"), "/nowhere/at/all", None, 1)
    relay.start()
    reader, _ = await asyncio.open_connection("127.0.0.1", relay.port)
    async with asyncio.timeout(SOON_S):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    await relay.stop()
