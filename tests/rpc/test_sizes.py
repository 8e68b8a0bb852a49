"""What is too long is refused by its length: at the gateway, at a worker's services and in the engine."""

from __future__ import annotations

import asyncio
import math

import grpc
import msgspec
import pytest
from fake_engine import request, worker
from scripted_backend import INFO

from eyas.common.config import GatewayConfig
from eyas.common.errors import ContextLengthExceeded, InvalidRequest
from eyas.common.types import GenerationRequest, Role
from eyas.common.wire import clients, convert, message, rpc
from eyas.engine.ipc.messages import PrefillPrompt, SubmitGeneration
from gateway.backends.admission import GenerationOptions, admit, served_model
from protos import prefill_pb2, prefill_pb2_grpc

LONG = (2**31 - 1,) * 129  # one more than the context, and no token at all: a look at one is told


def bad_times() -> list[GenerationRequest]:
    return [msgspec.structs.replace(request(1), timeout_s=time) for time in (math.nan, math.inf, 0.0, -1.0)]


def test_the_gateway_counts_before_it_looks() -> None:
    model = served_model(GatewayConfig(), [INFO])
    with pytest.raises(ContextLengthExceeded):
        admit(model, LONG, GenerationOptions(), 60.0)


async def test_a_prompt_is_refused_before_the_engine_hears_of_it() -> None:
    async with worker(Role.PREFILL) as w, rpc.channel(w.address) as channel:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        got = []
        for bad in [request(*LONG), *bad_times()]:
            message = prefill_pb2.PrefillRequest(attempt=1)
            convert.fill_request(message.request, bad)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Prefill(message, timeout=5).read()
            error = rpc.map_rpc_error(caught.value)
            got.append((type(error), error.param))
        assert got == [(ContextLengthExceeded, "prompt"), *[(InvalidRequest, "timeout_s")] * 4]
        assert w.engine.of(PrefillPrompt) == []


async def test_a_session_refuses_one_request_and_lives_on() -> None:
    async with worker(Role.DECODE) as w, rpc.channel(w.address) as channel:
        session = clients.DecodeSessionClient(channel, w.address).open()
        bad = [request(*LONG), *bad_times()]
        for attempt, each in enumerate(bad):
            session.submit(each, attempt, attach=False)
        session.submit(request(1), attempt=9, attach=False)
        refused = []
        async with asyncio.timeout(30):
            async for event in session:
                if isinstance(event, message.RequestRejected):
                    error = event.failure.error()
                    refused.append((event.attempt, type(error), error.param))
                if isinstance(event, message.RequestAdmitted):
                    break
        times = [(attempt, InvalidRequest, "timeout_s") for attempt in range(1, 5)]
        assert refused == [(0, ContextLengthExceeded, "prompt"), *times]
        assert len(w.engine.of(SubmitGeneration)) == 1
        session.close()
