"""Errors keep their class across the wire, unary and streaming; a defect says nothing of its inside."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from eyas.common import errors
from eyas.common.errors import DeadlineExceeded, EyasError, InvalidRequest, Overloaded, Unavailable
from eyas.common.wire import rpc
from eyas.common.wire.buffer import StreamBuffer
from eyas.common.wire.info import InfoServicer
from protos import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc


class Raising(decode_pb2_grpc.DecodeServiceServicer, prefill_pb2_grpc.PrefillServiceServicer):
    """Every method raises `error`, streams after their first message."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def info(self) -> Any:
        raise self.error

    async def probe(self, owner: str) -> Any:
        raise self.error

    async def flush(self, wait_s: float) -> Any:
        raise self.error

    async def Session(self, up: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        yield decode_pb2.DecodeServiceSessionResponse()
        raise self.error

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield prefill_pb2.PrefillResponse()
        raise self.error


@contextlib.asynccontextmanager
async def serving(error: Exception) -> AsyncIterator[grpc.aio.Channel]:
    server, servicer = rpc.server(), Raising(error)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)
    InfoServicer(servicer.info, servicer.probe, servicer.flush).register(server)
    rpc.HealthService(server, [])
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def raised_by(channel: grpc.aio.Channel) -> list[EyasError]:
    """What a unary, a server-streaming and a bidirectional call end with."""
    info = worker_pb2_grpc.WorkerServiceStub(channel).Info(worker_pb2.InfoRequest(), timeout=5)
    prefill = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(prefill_pb2.PrefillRequest(), timeout=5)
    session = decode_pb2_grpc.DecodeServiceStub(channel).Session(timeout=5)
    got = []
    for call in (info, prefill, session):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if call is info:
                await call
            else:
                assert len([await call.read()]) == 1
                await call.read()
        got.append(rpc.map_rpc_error(caught.value))
    return got


@pytest.mark.parametrize("cls", errors._tree(EyasError))
async def test_every_class_survives(cls: type[EyasError]) -> None:
    async with serving(cls("naïve 100 % of it", param="top_p")) as channel:
        for error in await raised_by(channel):
            assert (type(error), error.message, error.param) == (cls, "naïve 100 % of it", "top_p")


async def test_a_defect_is_logged_and_sent_without_details(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(KeyError("/secret/path")) as channel:
        for error in await raised_by(channel):
            assert (type(error), error.message) == (EyasError, "internal error")
    assert caplog.text.count("/secret/path") == 3


METHODS = (
    "/eyas.internal.v1.WorkerService/Info",
    "/eyas.internal.v1.PrefillService/Prefill",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)


@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_no_message_are_the_callers_fault(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(KeyError("never raised")) as channel:
        call = channel.stream_stream(method)(iter([b"\xff" * 9]), timeout=5)
        assert type(await fate(call)) is InvalidRequest
    assert caplog.text == ""


@pytest.mark.parametrize("method", METHODS[:2])
async def test_a_call_without_its_message_is_answered(method: str) -> None:
    async with serving(KeyError("never raised")) as channel:
        assert type(await fate(channel.stream_stream(method)(iter([]), timeout=5))) is InvalidRequest


async def fate(call: grpc.aio.Call) -> EyasError:
    """What a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read() is not grpc.aio.EOF:
            pass
        raise AssertionError("it ended well")
    return rpc.map_rpc_error(caught.value)


async def test_an_address_without_a_server_is_unavailable() -> None:
    async with rpc.channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerServiceStub(channel).Info(worker_pb2.InfoRequest(), timeout=5)
        assert type(rpc.map_rpc_error(caught.value)) is Unavailable
        assert not await rpc.is_serving(channel)


async def test_a_full_buffer_ends_its_stream_and_keeps_no_more() -> None:
    buffer: StreamBuffer[int] = StreamBuffer(limit=2)
    for item in range(5):
        buffer.put(item)
    with pytest.raises(Overloaded, match="2 messages behind"):
        await buffer.get()


async def test_a_buffer_delivers_what_it_holds_before_its_end() -> None:
    buffer: StreamBuffer[int] = StreamBuffer(limit=2, deadline=asyncio.get_running_loop().time() + 0.05)
    buffer.put(1)
    assert await buffer.get() == 1
    with pytest.raises(DeadlineExceeded):
        await buffer.get()
    buffer.put(2)
    buffer.end(Unavailable("gone"))
    buffer.put(3)
    assert await buffer.get() == 2
    with pytest.raises(Unavailable):
        await buffer.get()
