"""OpenAI's `prediction`, and the SDK's: what arrives at which worker, as ids, and what is refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from http_client import CHAT, TEXT, client_of, refused
from scripted_backend import INFO, ScriptedBackend, first, nano_tokenizer
from scripted_cluster import DECODE, PREFILL, collect, gateway, make_request
from scripted_worker import expected, workers

from eyas.client import AsyncClient
from eyas.common.types import GenerationRequest
from tests.rpc.scripted_cluster import collect_after
from tests.rpc.sdk_front import served

URL = "/v1/chat/completions"
FILE = "def area(radius):\n    return 3 * radius * radius\n"


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(nano_tokenizer())


@pytest.fixture
async def client(backend: ScriptedBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(backend) as client:
        yield client


def content(told: Any) -> dict[str, Any]:
    return CHAT | {"prediction": {"type": "content", "content": told}}


async def test_text_and_parts_become_ids(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    parts = [{"type": "text", "text": FILE[:9]}, {"type": "text", "text": FILE[9:]}]
    for told in (FILE, parts):
        response = await client.post(URL, json=content(told))
        assert response.status_code == 200 and "x-eyas-ignored" not in response.headers
    ids = backend.tokenizer.encode(FILE, special=False)
    assert [request.predicted for request in backend.requests] == [ids, ids]
    bare = await client.post(URL, json=CHAT)
    assert backend.requests[-1].predicted == ()
    assert bare.json()["choices"] == response.json()["choices"]


async def test_a_prediction_is_no_longer_than_an_answer(client, backend) -> None:
    await client.post(URL, json=content(FILE * 20))
    (request,) = backend.requests
    assert len(request.prompt_ids) + len(request.predicted) == 128  # the context
    assert request.predicted == backend.tokenizer.encode(FILE * 20, special=False)[: len(request.predicted)]


async def test_without_drafts_nothing_is_predicted(client, backend) -> None:
    await client.post(URL, json=content(FILE) | {"speculative": False})
    await client.post(URL, json=content(""))
    assert [request.predicted for request in backend.requests] == [(), ()]


async def test_only_chats_are_predicted(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    response = await client.post("/v1/completions", json=TEXT | {"prediction": {"type": "content"}})
    assert response.headers["x-eyas-ignored"] == "prediction"
    assert backend.requests[0].predicted == ()


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("x", "prediction"),
        ([], "prediction"),
        ({"content": "x"}, "prediction.type"),
        ({"type": "diff", "content": "x"}, "prediction.type"),
        ({"type": 5, "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": {"text": "x"}}, "prediction.content"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
    ],
)
async def test_what_is_no_prediction_is_refused(client, backend, prediction: Any, param: str) -> None:
    assert param in refused(await client.post(URL, json=CHAT | {"prediction": prediction}), param)
    assert backend.requests == []


async def test_ids_that_the_model_does_not_have_are_refused(client, backend) -> None:
    """A folder's tokenizer may know more of them than its model."""
    most = max(backend.tokenizer.encode(FILE, special=False))
    backend.infos = [msgspec.structs.replace(INFO, vocab_size=most)]
    refused(await client.post(URL, json=content(FILE)), "prediction")
    assert (await client.post(URL, json=CHAT)).status_code == 200


async def test_the_sdk_predicts_too(backend: ScriptedBackend) -> None:
    async with served(backend) as address, AsyncClient(address, retries=0) as client:
        await client.chat([{"role": "user", "content": "Hi"}], prediction=FILE)
        await client.generate("x", prediction=FILE)
        await client.generate("x")
    ids = backend.tokenizer.encode(FILE, special=False)
    assert [request.predicted for request in backend.requests] == [ids, ids, ()]


def predicted() -> GenerationRequest:
    return msgspec.structs.replace(make_request(), predicted=(7, 8, 9))


async def test_who_decodes_is_told_and_who_computes_the_prompt_is_not() -> None:
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        prefill, decode = started
        await collect(await backend.start(predicted()))
        (asked,), (submitted,) = prefill.of("prefill"), decode.of("submit")
    assert tuple(submitted.request.predicted_ids) == (7, 8, 9)
    assert not asked.request.predicted_ids


async def test_a_request_that_moves_takes_its_prediction_along() -> None:
    async with workers(PREFILL, DECODE, DECODE) as started, gateway(started) as (backend, _):
        decodes = started[1:]
        for worker in decodes:
            worker.script.stop_at = 4
        request = predicted()
        stream = await backend.start(request)
        got = await first(stream, 2)
        (dying,) = [worker for worker in decodes if worker.of("submit")]
        (heir,) = [worker for worker in decodes if worker is not dying]
        heir.script.stop_at = None
        await dying.kill()
        assert await collect_after(got, stream) == {0: expected(request, 0)}
        (submitted,) = heir.of("submit")
        assert tuple(submitted.request.predicted_ids) == (7, 8, 9)
