"""A grammar that is slow to follow, behind a gateway that lets it through: it fails, and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from http_client import client_of
from real_worker import real_worker

from eyas.common.cluster.discovery import registry
from eyas.common.config import NANO, EngineConfig
from eyas.common.types import Role
from eyas.engine.grammar import grammars
from gateway.backends.generate import ClusterBackend
from gateway.routing.cluster import Cluster
from gateway.text.tokenizer import Tokenizer

CHAT = {"model": "eyas-nano", "messages": [{"role": "user", "content": "Tell me about Rome."}], "seed": 7}
TRAP = 'root ::= [a-z ]{40} (([a-z ]*)* [a-z ]*)* "x"'


class Backend(ClusterBackend):
    """With what the fronts are given beside it."""

    tokenizer = Tokenizer.load(NANO)


@pytest_asyncio.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with real_worker(EngineConfig(num_pages=128, pool_dir=str(tmp_path)), *Role) as worker:
        cluster = Cluster(registry(f"static:{worker.address}"))
        await cluster.start()
        try:
            async with client_of(Backend(cluster)) as client:  # type: ignore[arg-type]
                client.timeout = httpx.Timeout(120)
                yield client
        finally:
            await cluster.aclose()


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_it_fails_alone(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(grammars, "ALLOWED_S", 0.2)
    monkeypatch.setattr(grammars, "PER_TOKEN_S", 0.001)
    ordinary = CHAT | {"max_tokens": 60, "stream": True}
    slow = CHAT | {"max_tokens": 400, "guided_grammar": TRAP, "temperature": 1.0, "stream": stream}

    async def text(body: dict[str, object]) -> str:
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        assert response.text.rstrip().endswith("data: [DONE]")
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    alone = await text(ordinary)
    beside, refused = await asyncio.gather(text(ordinary), client.post("/v1/chat/completions", json=slow))
    assert beside == alone != ""
    if stream:
        told = [line[6:] for line in refused.text.splitlines() if '"error"' in line]
        error = json.loads(told[0])["error"]
    else:
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "guided_grammar"
    assert error["code"] == "grammar_too_slow" and "too long to follow" in error["message"]


async def test_one_that_forces_text_without_end_fails_alone(client: httpx.AsyncClient) -> None:
    """To look for what it forces would not end, and hold up every stream of the engine."""
    endless = CHAT | {"max_tokens": 20, "guided_grammar": 'root ::= "a" root'}
    ordinary, refused = await asyncio.gather(
        *(client.post("/v1/chat/completions", json=body) for body in (CHAT | {"max_tokens": 20}, endless))
    )
    assert ordinary.status_code == 200 and refused.status_code == 400
    assert refused.json()["error"]["param"] == "guided_grammar"
    assert refused.json()["error"]["message"].endswith("its rule root has no text that ends")
