"""The console over HTTP: its files and what a browser may do with them, and the requests that it draws."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_client import CHAT, GENERATE, TEXT, client_of
from real_cluster import real_cluster
from real_worker import tiny_config
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.common.config import GatewayConfig
from eyas.common.errors import Overloaded
from eyas.common.types import EngineTimings, Role
from tests.rpc.real_cluster import SPLIT

FILES = sorted(path.name for path in Path(str(files("gateway") / "static" / "console")).iterdir())
SECRET = "xyzzy"


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(nano_tokenizer(), says=lambda request, choice: f"It is {SECRET}, and more of it.")


@pytest.fixture
async def client(backend: ScriptedBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(backend) as client:
        yield client


async def recent(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    answer = await client.get("/requests")
    assert answer.status_code == 200
    found: list[dict[str, Any]] = answer.json()["requests"]
    return found


def policy(response: httpx.Response) -> dict[str, str]:
    """The directives of a response's policy for its content."""
    directives = response.headers["content-security-policy"].split(";")
    return {name: rest for name, _, rest in (directive.strip().partition(" ") for directive in directives)}


async def test_every_file_is_served_with_a_strict_policy(client: httpx.AsyncClient) -> None:
    kinds = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
    assert {name.rpartition(".")[2] for name in FILES} == kinds.keys()
    for path in ["/", *(f"/console/{name}" for name in FILES)]:
        response = await client.get(path)
        kind = "html" if path == "/" else path.rpartition(".")[2]
        assert response.status_code == 200 and response.headers["content-type"].startswith(kinds[kind])
        assert response.headers["x-content-type-options"] == "nosniff"
        rules = policy(response)
        assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
        assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
        assert "unsafe" not in response.headers["content-security-policy"]


async def test_the_page_names_files_that_exist(client: httpx.AsyncClient) -> None:
    page = (await client.get("/")).text
    assert "http://" not in page and "https://" not in page
    named = re.findall(r'(?:src|href)="(console/[^"]+)"', page)
    assert len(named) >= 2
    for path in named:
        assert (await client.get(f"/{path}")).status_code == 200


@pytest.mark.parametrize("name", ["nothing.js", "..%2fdocs.html", "%2e%2e", "console.html%00.js"])
async def test_nothing_else_is_served(client: httpx.AsyncClient, name: str) -> None:
    assert (await client.get(f"/console/{name}")).status_code == 404


async def test_it_is_all_behind_the_keys(backend: ScriptedBackend) -> None:
    async with client_of(backend, GatewayConfig(api_keys=("k",))) as client:
        for path in ("/", "/console/main.js", "/requests"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, auth=("anyone", "k"))).status_code == 200


async def test_requests_of_every_kind_are_told_without_a_word_of_them(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.timings = EngineTimings(queue_ms=1.0, prefill_ms=2.0, worker="w:1", role=Role.DECODE)
    asks = [
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": SECRET}]}),
        ("/v1/completions", TEXT | {"prompt": [SECRET, SECRET], "n": 2, "max_tokens": 3}),
        ("/generate", GENERATE | {"text": SECRET, "stream": True}),
    ]
    for count, (path, body) in enumerate(asks):
        headers = {"x-request-id": f"number-{count}"}
        assert (await client.post(path, json=body, headers=headers)).status_code == 200
    told = await recent(client)
    assert [request["id"] for request in told] == ["number-2", "number-1", "number-0"]
    assert [request["finish"] for request in told] == [["stop"], ["length"] * 4, ["stop"]]
    assert told[1]["completion_tokens"] == 12
    assert told[0]["acceptance_length"] > 1
    for request in told:
        assert {"queue", "prefill"} <= {part["name"] for part in request["parts"]}
        assert 0 < request["first_token_ms"] <= request["total_ms"]
        for part in request["parts"]:
            assert part["ms"] >= 0 and part["name"] in ("queue", "prefill", "decode")
    assert SECRET not in (await client.get("/requests")).text


async def test_who_leaves_early_is_told_without_a_reason(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.pause_s = 5.0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await client.post("/v1/chat/completions", json=CHAT)
    (request,) = await recent(client)
    assert request["finish"] == [] and request["completion_tokens"] == 2
    assert 200 < request["total_ms"] < 4000


async def test_what_is_refused_is_no_request(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/chat/completions", json=CHAT | {"model": "none"})).status_code == 404
    assert await recent(client) == []


async def test_a_split_request_tells_both_workers_and_their_link(tmp_path: Path) -> None:
    async with real_cluster(tiny_config(tmp_path), tmp_path, SPLIT) as cluster:
        assert (
            await cluster.http.post(
                "/v1/completions", json=TEXT | {"prompt": [*range(3, 40)], "max_tokens": 4}
            )
        ).status_code == 200
        prefill, decode = (worker.address for worker in cluster.workers)
        (request,) = await recent(cluster.http)
        where = {(part["name"], part.get("worker")): part for part in request["parts"]}
        assert where.keys() == {
            ("queue", prefill),
            ("prefill", prefill),
            ("queue", decode),
            ("transfer", decode),
            ("decode", None),
        }
        transfer = where["transfer", decode]
        assert transfer["bytes"] > 0 and transfer["path"] == "shm"
        assert where["decode", None]["start_ms"] == request["first_token_ms"]
        link = f'{{model_name="eyas-nano",path="shm",source="{prefill}",target="{decode}"}}'
        assert (
            f"eyas_link_bytes_total{link} {transfer['bytes']:.1f}"
            in (await cluster.http.get("/metrics")).text.splitlines()
        )


async def test_a_stream_tells_the_tokens_of_each_step_and_which_were_drafted(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    """What the playground asks for: log-probabilities and continuous usage, one event per step."""
    backend.stride = 3
    asked = {
        "stream": True,
        "logprobs": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    response = await client.post("/v1/chat/completions", json=CHAT | asked)
    events = [httpx.Response(200, text=line[6:]).json() for line in response.text.split("\n\n")[:-2]]
    accepted, text = 0, ""
    steps = [event for event in events if event["choices"] and event["choices"][0]["logprobs"]]
    assert len(steps) > 2
    for number, event in enumerate(steps):
        (choice,) = event["choices"]
        tokens = [token["token"] for token in choice["logprobs"]["content"]]
        text += "".join(tokens)
        drafted = event["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] - accepted
        accepted += drafted
        assert drafted == (min(2, len(tokens)) if number else 0)
    assert text.startswith(f"It is {SECRET}, and more of it.")


async def test_failures_are_listed_with_their_reason(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    assert (await client.post("/v1/completions", json=TEXT | {"n": SECRET})).status_code == 400
    backend.refusal = Overloaded("the queue is full")
    assert (await client.post("/v1/completions", json=TEXT)).status_code == 429
    told = (await client.get("/requests")).json()["failures"]
    assert [
        (failure["status"], failure["path"], failure["reason"] or failure["code"]) for failure in told
    ] == [
        (429, "/v1/completions", "the queue is full"),
        (400, "/v1/completions", "invalid_request"),
    ]
    assert SECRET not in (await client.get("/requests")).text
    assert (await client.get("/history")).json() == {"series": [], "samples": []}
