"""The examples of docs/structured-output.md, through a gateway and a worker of the embedded model."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import pytest_asyncio
from http_client import client_of, refused
from real_worker import real_worker

from eyas.client import AsyncClient, Grammar, InvalidRequest
from eyas.common.cluster.discovery import registry
from eyas.common.config import NANO, EngineConfig
from eyas.common.types import Role
from gateway.backends.generate import ClusterBackend
from gateway.grammars.checks import GrammarBackend, GrammarChecks
from gateway.routing.cluster import Cluster
from gateway.text.tokenizer import Tokenizer
from tests.rpc.sdk_front import served

PAGE = Path(__file__).resolve().parents[2] / "docs" / "structured-output.md"
EXAMPLES = [json.loads(block) for block in re.findall(r"^```json\n(.*?)^```", PAGE.read_text(), re.M | re.S)]


class Backend(GrammarBackend):
    """With what the fronts are given beside it."""

    tokenizer = Tokenizer.load(NANO)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Backend]:
    config = EngineConfig(num_pages=128, pool_dir=str(tmp_path_factory.mktemp("pools")))
    async with real_worker(config, *Role) as worker:
        cluster, checks = Cluster(registry(f"static:{worker.address}")), GrammarChecks(Path(NANO))
        await cluster.start()
        try:
            yield Backend(ClusterBackend(cluster, None), checks)
        finally:
            await checks.aclose()
            await cluster.aclose()


def holds(body: dict[str, Any], text: str) -> bool:
    if "guided_choice" in body:
        return text in body["guided_choice"]
    if "guided_regex" in body:
        return re.fullmatch(body["guided_regex"], text) is not None
    if "guided_grammar" in body:
        return re.fullmatch(r"\d\d? \+ \d\d?", text) is not None
    jsonschema.validate(json.loads(text), body["response_format"]["json_schema"]["schema"])
    return True


async def whole(client: httpx.AsyncClient, body: dict[str, Any]) -> list[str]:
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * len(choices)
    return [choice["message"]["content"] for choice in choices]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
async def test_an_example_holds(backend: Backend, number: int) -> None:
    """And is the same without drafts."""
    body = EXAMPLES[number] | {"seed": 7, "max_tokens": 64}
    async with client_of(backend, tokenizer=backend.tokenizer) as client:  # type: ignore[arg-type]
        texts = await whole(client, body)
        assert all(holds(body, text) for text in texts), texts
        assert len(texts) == body.get("n", 1)
        assert await whole(client, body | {"speculative": False}) == texts


@pytest.mark.asyncio(loop_scope="module")
async def test_the_sdk_is_held_and_refused_alike(backend: Backend) -> None:
    async with served(backend) as address, AsyncClient(address, retries=0) as client:  # type: ignore[arg-type]
        answer = await client.chat(
            [{"role": "user", "content": "Hi"}], grammar=Grammar.choice(["ja", "nein"]), max_tokens=8
        )
        assert answer.text in ("ja", "nein")
        with pytest.raises(InvalidRequest, match="at #: no value"):
            await client.chat(
                [{"role": "user", "content": "Hi"}], grammar=Grammar.json_schema({"not": {}}), max_tokens=8
            )


@pytest.mark.asyncio(loop_scope="module")
async def test_what_cannot_be_followed_is_a_400_with_its_place(backend: Backend) -> None:
    schema = {"type": "object", "properties": {"a": {"$dynamicRef": "#"}}}
    body = EXAMPLES[1] | {"guided_choice": None, "guided_json": schema}
    async with client_of(backend, tokenizer=backend.tokenizer) as client:  # type: ignore[arg-type]
        message = refused(await client.post("/v1/chat/completions", json=body), "guided_json")
    assert "at #/properties/a/$dynamicRef: $dynamicRef is not supported" in message
