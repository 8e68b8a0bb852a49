"""A gateway that is asked to leave: what is open may finish, and what cannot has its end, on both fronts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from scripted_backend import ScriptedBackend, nano_tokenizer
from scripted_cluster import UNIFIED, make_request
from scripted_cluster import gateway as cluster_backend
from scripted_worker import workers

from eyas.client import AsyncClient
from eyas.common.cluster.listening import free_ports
from eyas.common.config import GatewayConfig
from eyas.common.errors import Unavailable
from gateway.main import DrainableBackend, fronts
from gateway.observe.metrics import GatewayMetrics
from tests.rpc.gateway_process import gateway_process, line_with

BODY = {"model": "eyas-nano", "prompt": "x", "max_tokens": 100}


@contextlib.asynccontextmanager
async def leaving(
    pause_s: float,
) -> AsyncIterator[tuple[DrainableBackend, ScriptedBackend, httpx.AsyncClient, str]]:
    """Both fronts of a slow backend: (the way out, the backend, an HTTP client, gRPC's address)."""
    ports = free_ports()
    config = GatewayConfig(port=next(ports), grpc_port=next(ports))
    backend = ScriptedBackend(nano_tokenizer(), says=lambda *_: "word " * 20, pause_s=pause_s)
    exit = DrainableBackend(backend)
    url = f"http://127.0.0.1:{config.port}"
    async with (
        fronts(config, exit, backend.tokenizer, GatewayMetrics(CollectorRegistry())),
        httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as http,
    ):
        yield exit, backend, http, f"127.0.0.1:{config.grpc_port}"


async def events_of(http: httpx.AsyncClient) -> list[Any]:
    async with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as reply:
        lines = [line.removeprefix("data: ") async for line in reply.aiter_lines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def begun(backend: ScriptedBackend, count: int) -> None:
    async with asyncio.timeout(30):
        while sum(stream.told > 0 for stream in backend.streams) < count:
            await asyncio.sleep(0.01)


async def test_open_requests_finish_and_new_ones_are_refused() -> None:
    async with leaving(pause_s=1.0) as (exit, backend, http, grpc), AsyncClient(grpc) as client:
        open = [
            asyncio.create_task(events_of(http)),
            asyncio.create_task(client.generate("x", max_tokens=100)),
        ]
        await begun(backend, 2)
        empty = asyncio.Event()
        exit.close(on_empty=empty.set)
        health = await http.get("/health")
        assert health.status_code == 503 and "draining" in health.json()["error"]["message"]
        refused = await http.post("/v1/completions", json=BODY)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "unavailable"
        with pytest.raises(Unavailable, match="draining"):
            await client.generate("x", max_tokens=100)
        assert not empty.is_set()
        backend.pause_s = 0.0
        events, completion = await asyncio.gather(*open)
        assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "stop"
        assert completion.text == "word " * 20
        await asyncio.wait_for(empty.wait(), 30)
        assert len(backend.requests) == 2


async def test_requests_that_cannot_finish_end_with_an_error() -> None:
    async with leaving(pause_s=1.0) as (exit, backend, http, grpc), AsyncClient(grpc) as client:
        whole = asyncio.create_task(http.post("/v1/completions", json=BODY))
        streamed = asyncio.create_task(events_of(http))
        called = asyncio.create_task(client.generate("x", max_tokens=100))
        await begun(backend, 3)
        empty = asyncio.Event()
        exit.close(on_empty=empty.set)
        exit.cut()
        assert (await whole).status_code == 503 and "draining" in (await whole).json()["error"]["message"]
        *_, error, done = await streamed
        assert done == "[DONE]" and error["error"]["code"] == "unavailable"
        with pytest.raises(Unavailable, match="draining"):
            await called
        await asyncio.wait_for(empty.wait(), 30)


async def test_a_request_that_is_being_admitted_is_cut_too() -> None:
    backend = ScriptedBackend(nano_tokenizer())
    entered = asyncio.Event()

    async def never(_: object) -> Any:
        entered.set()
        await asyncio.Event().wait()

    backend.start = never  # type: ignore[assignment]
    exit = DrainableBackend(backend)
    start = asyncio.create_task(exit.start(make_request()))
    await entered.wait()
    assert exit.requests == 1
    exit.close(on_empty=lambda: None)
    exit.cut()
    with pytest.raises(Unavailable, match="draining"):
        await start
    assert exit.requests == 0


async def test_a_generation_that_fails_leaves_its_workers() -> None:
    async with workers(UNIFIED) as (one,), cluster_backend([one]) as (backend, cluster):
        one.script.stop_at = 4
        stream = await backend.start(make_request())
        await stream.take()
        stream.fail(Unavailable("enough"))
        with pytest.raises(Unavailable, match="enough"):
            while await stream.take():
                pass
        async with asyncio.timeout(30):
            while not one.of("cancel") or cluster.candidates()[0].in_flight:
                await asyncio.sleep(0.01)
        await stream.aclose()


# --- the process -----------------------------------------------------------------------------------------


async def test_a_gateway_says_where_it_listens_and_for_whom_it_waits() -> None:
    absent = f"127.0.0.1:{next(free_ports())}"
    async with gateway_process(f"--registry=static:{absent}") as (process, said):
        listening = await line_with(said, "gateway listening")
        pattern = r".*: model=eyas-nano http=(http://127\.0\.0\.1:[1-9]\d*)/v1 grpc=127\.0\.0\.1:[1-9]\d*\n"
        where = re.fullmatch(pattern, listening)
        assert where, listening
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(where[1] + "/health")).status_code == 503
        waiting = await line_with(said, "waiting for worker")
        assert f"waiting for worker {absent}: Connection refused" in waiting
        process.send_signal(signal.SIGINT)
        rest = (await said.read()).decode()
        assert await process.wait() == 0 and "Traceback" not in rest
