"""Floods of prompts beside streams: each is answered or refused, and nothing that has begun ends."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry
from scripted_backend import ScriptedBackend, each, first, nano_tokenizer
from scripted_cluster import DECODE, PREFILL, UNIFIED, collect, gateway, make_request, until
from scripted_worker import expected, workers

from eyas.common.config import GatewayConfig
from eyas.common.types import GenerationRequest, Role
from eyas.common.wire import convert
from gateway.backends import sessions
from gateway.grpc.front import GrpcFront
from gateway.http.front import create_app
from gateway.limits import queues
from gateway.limits.quotas import CallerQuotas
from gateway.observe.metrics import GatewayMetrics
from protos import eyas_pb2
from tools.bench.gateway_prompts import measure

LARGE = {"model": "eyas-nano", "prompt": [7] * 100, "max_tokens": 4, "user": "x" * queues.LARGE_BYTES}


async def test_what_waits_to_be_read_is_bounded_on_both_fronts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused has been sent to no worker; who asks for little is served meanwhile."""
    monkeypatch.setattr(queues, "MAX_WAITING_BYTES", 6 * queues.LARGE_BYTES)
    backend, config = ScriptedBackend(nano_tokenizer()), GatewayConfig(grpc_port=0)
    given = (config, backend, backend.tokenizer, GatewayMetrics(CollectorRegistry()), CallerQuotas())
    front = GrpcFront(*given)
    await front.start()
    transport = httpx.ASGITransport(create_app(*given))
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=10) as http,
        grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel,
    ):
        posts = [http.post("/v1/completions", json=LARGE) for _ in range(12)]
        small = http.post("/v1/completions", json=LARGE | {"user": "x"})
        *replies, little = await asyncio.gather(*posts, small)
        statuses = Counter(reply.status_code for reply in replies)
        assert statuses[200] >= 5 and statuses[429] >= 5 and little.status_code == 200, statuses
        refused = next(reply for reply in replies if reply.status_code == 429)
        assert refused.headers["retry-after"] == "1" and "too many requests wait" in refused.text
        assert len(backend.requests) == statuses[200] + 1
        codes = Counter(await asyncio.gather(*(_generate(channel) for _ in range(12))))
        read, waited = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
        assert codes[read] >= 1 and codes[waited] >= 1 and codes[read] + codes[waited] == 12, codes
    await front.aclose()


async def _generate(channel: grpc.aio.Channel) -> grpc.StatusCode:
    """How a large call ends, whose stop string is too long: that is known once it is read."""
    asked = eyas_pb2.GenerateRequest(ids=eyas_pb2.TokenIds(ids=[7] * 100))
    asked.options.max_tokens = 4
    asked.options.stop.append("x" * queues.LARGE_BYTES)
    call = channel.unary_stream("/eyas.v1.Eyas/Generate")(asked.SerializeToString(), timeout=10)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return await call.code()


async def test_a_busy_gateway_does_not_take_its_worker_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came while the event loop was busy is read before the verdict."""
    monkeypatch.setattr(sessions, "SILENCE_S", 0.3)
    async with workers(UNIFIED) as started, gateway(started) as (backend, _):
        started[0].script.step_s = 0.05
        request = make_request(tokens=30)
        stream = await backend.start(request)
        entries = await first(stream, 1)
        for _ in range(3):
            time.sleep(0.6)  # as parsing without an end would
            await asyncio.sleep(0)
        entries += [entry async for entry in each(stream)]
        assert [id for entry in entries for id in entry.tokens] == expected(request)
        assert len(started[0].of("submit")) == 1


class Sent:
    """Notes in which turn of the event loop each prompt is written for a worker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turns: list[int] = []
        self._now = 0
        self._fill = convert.fill_request
        monkeypatch.setattr(convert, "fill_request", self._noted)

    async def count(self) -> None:
        while True:
            self._now += 1
            await asyncio.sleep(0)

    def _noted(self, message: Any, request: GenerationRequest) -> None:
        self.turns.append(self._now)
        self._fill(message, request)

    @property
    def least(self) -> int:
        """Turns between one and the next."""
        return min(after - before for before, after in itertools.pairwise(self.turns))


@pytest.mark.parametrize("roles", [[UNIFIED, UNIFIED], [PREFILL, PREFILL, DECODE]])
async def test_prompts_that_are_sent_again_take_turns(
    roles: list[tuple[Role, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a worker that dies with many of them: the event loop turns for others between two."""
    monkeypatch.setattr(queues, "LARGE_BYTES", 1)
    sent = Sent(monkeypatch)
    async with workers(*roles) as started, gateway(started) as (backend, _):
        counting = asyncio.create_task(sent.count())
        twins = started[:2]
        for worker in twins:
            worker.script.hold_prefill_at, worker.script.stop_at = "admitted", 2
        requests = [make_request(f"r{number}") for number in range(16)]
        streams = [await backend.start(request) for request in requests]
        kind = "submit" if roles[0] == UNIFIED else "prefill"
        dying, heir = sorted(twins, key=lambda worker: len(worker.of(kind)), reverse=True)
        lost = len(dying.of(kind))
        sent.turns.clear()
        heir.script.hold_prefill_at, heir.script.stop_at = "", None
        heir.script.released.set()
        await dying.kill()
        await until(lambda: len(heir.of(kind)) == len(requests))
        counting.cancel()
        assert lost >= 8 and len(sent.turns) == lost and sent.least >= queues.TURNS, sent.turns
        for stream in streams:
            await stream.aclose()


async def test_a_new_prompt_takes_a_turn_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "LARGE_BYTES", 1)
    sent = Sent(monkeypatch)
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        counting = asyncio.create_task(sent.count())
        requests = [make_request(f"r{number}") for number in range(5)]
        streams = await asyncio.gather(*(backend.start(request) for request in requests))
        counting.cancel()
        assert len(sent.turns) == 2 * len(requests) and sent.least >= queues.TURNS, sent.turns
        for stream, request in zip(streams, requests, strict=True):
            assert await collect(stream) == {0: expected(request)}


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "rate"), [(60_000, 150), (6_000, 600), (14, 800)])
async def test_a_flood_of_prompts_ends_no_stream(tokens: int, rate: int) -> None:
    """More than a process can read come for some seconds: `measure` raises if a stream beside them ends, or
    its worker is given up.
    """
    calm, *_, flood = [row async for row in measure(tokens, 5, ids_rate=rate)]
    print(calm, flood)
    assert flood["prompts"] >= 30
    _, p99, longest = flood["gaps_p50_p99_max"]
    assert p99 < 1000 and longest < calm["gaps_p50_p99_max"][2] + 1500
