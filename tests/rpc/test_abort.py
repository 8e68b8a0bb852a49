"""/abort_request ends a request that runs, by any of its names, wherever it runs, and no other's."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_client import CHAT, GENERATE, TEXT, client_of, refused
from prometheus_client import CollectorRegistry
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.common.config import GatewayConfig
from gateway.http.front import create_app
from gateway.http.siblings import GatewaySiblings
from gateway.observe.metrics import GatewayMetrics


@pytest.fixture
def backend() -> ScriptedBackend:
    """One that says a token now and then, and never ends while a test runs."""
    slow = ScriptedBackend(nano_tokenizer(), says=lambda *_: "word " * 500)
    slow.pause_s = 0.2
    return slow


async def started(backend: ScriptedBackend, count: int) -> None:
    async with asyncio.timeout(20):
        while len(backend.streams) < count:
            await asyncio.sleep(0.01)


async def abort(client: httpx.AsyncClient, body: dict[str, Any], **kwargs: Any) -> int:
    response = await client.post("/abort_request", json=body, **kwargs)
    assert response.status_code == 200, response.text
    (count,) = response.json().values()
    return int(count)


ASKS = [
    pytest.param("/v1/chat/completions", CHAT, id="chat"),
    pytest.param("/v1/completions", TEXT | {"prompt": ["a", "b"]}, id="text"),
    pytest.param("/generate", GENERATE | {"rid": "mine"}, id="generate"),
]


@pytest.mark.parametrize(("path", "body"), ASKS)
async def test_a_request_ends_by_its_name(backend: ScriptedBackend, path: str, body: dict[str, Any]) -> None:
    async with client_of(backend) as client:
        ask = client.post(path, json=body, headers={"x-request-id": "mine" if "rid" not in body else "other"})
        asking = asyncio.create_task(ask)
        await started(backend, 2 if isinstance(body.get("prompt"), list) else 1)
        assert await abort(client, {"rid": "your"}) == 0 and not asking.done()
        assert await abort(client, {"rid": "mine"}) == 1
        response = await asyncio.wait_for(asking, 20)
        assert response.status_code == 499 and "abort_request" in response.json()["error"]["message"]
        for stream in backend.streams:
            await asyncio.wait_for(stream.closed.wait(), 20)
        assert await abort(client, {"rid": "mine"}) == 0


async def test_a_stream_ends_with_an_error_by_the_id_of_its_answer(backend: ScriptedBackend) -> None:
    async with client_of(backend) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
        await started(backend, 1)
        name = f"chatcmpl-{backend.requests[0].id}"
        async with asyncio.timeout(20):
            while not await abort(client, {"rid": name}):
                await asyncio.sleep(0.01)
        *_, last, done = [line for line in (await asyncio.wait_for(asking, 20)).text.split("\n\n") if line]
        told = json.loads((last if done == "data: [DONE]" else done).removeprefix("data: "))
        assert told["error"]["code"] == "cancelled"


async def test_abort_all_ends_the_caller_s_requests_alone(backend: ScriptedBackend) -> None:
    async with client_of(backend, GatewayConfig(api_keys=("k",))) as client:
        key = {"authorization": "Bearer k"}
        asks = [asyncio.create_task(client.post("/v1/completions", json=TEXT, headers=key)) for _ in range(3)]
        await started(backend, 3)
        assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 401
        assert not any(ask.done() for ask in asks)
        assert await abort(client, {"rid": "", "abort_all": True}, headers=key) == 3
        assert [(await asyncio.wait_for(ask, 20)).status_code for ask in asks] == [499] * 3


async def test_one_name_or_all_must_be_given(backend: ScriptedBackend) -> None:
    async with client_of(backend) as client:
        for body in ({}, {"rid": ""}, {"rid": None}, {"abort_all": False}):
            refused(await client.post("/abort_request", json=body), "rid")


async def test_it_ends_requests_of_the_gateway_s_other_processes(
    backend: ScriptedBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two fronts as of two processes: a socket each in one folder."""
    monkeypatch.setattr("gateway.backends.running.ABORT_S", 60.0)
    config, key = GatewayConfig(api_keys=("k", "other")), {"authorization": "Bearer k"}
    async with contextlib.AsyncExitStack() as owned:
        clients = []
        for i in range(2):
            metrics = GatewayMetrics(CollectorRegistry(), GatewaySiblings(tmp_path / f"gateway-{i}.sock"))
            await owned.enter_async_context(metrics)
            transport = httpx.ASGITransport(create_app(config, backend, backend.tokenizer, metrics))
            client = httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=20)
            clients.append(await owned.enter_async_context(client))
        one, other = clients

        def ask(client: httpx.AsyncClient, name: str) -> asyncio.Task[httpx.Response]:
            headers = key | {"x-request-id": name}
            return asyncio.create_task(client.post("/v1/completions", json=TEXT, headers=headers))

        mine, another = ask(other, "mine"), ask(other, "another")
        await started(backend, 2)
        assert await abort(one, {"rid": "mine"}, headers={"authorization": "Bearer other"}) == 0
        assert await abort(one, {"rid": "mine"}, headers=key) == 1
        assert (await asyncio.wait_for(mine, 20)).status_code == 499 and not another.done()
        here = ask(one, "here")
        await started(backend, 3)
        assert await abort(one, {"abort_all": True}, headers=key) == 2
        assert [(await asyncio.wait_for(task, 20)).status_code for task in (here, another)] == [499] * 2
