"""Every bad request is a 4xx with OpenAI's error body that names the field."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from http_client import refused
from prometheus_client import CollectorRegistry
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.common.config import GatewayConfig
from gateway.http.front import create_app
from gateway.observe.metrics import GatewayMetrics

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"model": "eyas-nano", "messages": MESSAGES}
TEXT: dict[str, Any] = {"model": "eyas-nano", "prompt": "Hi"}
CONFIG = GatewayConfig(max_body_bytes=4096, api_keys=("sesame",))
KEY = {"authorization": "Bearer sesame"}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    backend = ScriptedBackend(nano_tokenizer())
    app = create_app(CONFIG, backend, backend.tokenizer, GatewayMetrics(CollectorRegistry()))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=KEY) as client:
        yield client
    assert backend.requests == []  # nothing bad ever reaches a worker


def part(kind: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind}]}]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": part("image_url")}, "messages[0].content[1].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [*MESSAGES, {"role": "user", "content": "x", "tool_calls": [1]}]},
            "messages[1].tool_calls[0]",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"response_format": {"type": "poem"}}, "response_format.type"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}, "stream": False}, "stream_options"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"4096": 1}}, "logit_bias"),
        ({"logit_bias": {"word": 1}}, "logit_bias.word"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 513}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [4096]}, "stop_token_ids"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
async def test_chat_fields(client: httpx.AsyncClient, changes: dict[str, Any], param: str) -> None:
    response = await client.post("/v1/chat/completions", json=CHAT | changes)
    refused(response, param)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": []}, "messages: should have at least 1 item, not 0"),
        ({"stop_token_ids": [5] * 1000}, "stop_token_ids: should have at most 64 items, not 1000"),
        ({"bad_words": ["x" * 513]}, "bad_words[0]: should have at most 512 characters"),
        ({"n": 0}, "n: should be greater than or equal to 1"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1 is no token id"),
        ({"bad_words": ["no", " "]}, "bad_words[1]: must have a character beside spaces"),
    ],
)
async def test_reasons_are_plain(client: httpx.AsyncClient, changes: dict[str, Any], message: str) -> None:
    response = await client.post("/v1/chat/completions", json=CHAT | changes)
    assert response.json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [4096]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"stream_options": {"include_usage": False}}, "stream_options"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
    ],
)
async def test_completion_fields(client: httpx.AsyncClient, changes: dict[str, Any], param: str) -> None:
    response = await client.post("/v1/completions", json=TEXT | changes)
    refused(response, param)


@pytest.mark.parametrize(
    ("prompt", "place"), [([True, 1], 0), ([1, 2.0, "a"], 2), ([1] * 70 + [[1]], 70), ([2.0, 1.5], 1)]
)
async def test_what_is_no_token_id_is_named(client: httpx.AsyncClient, prompt: list[Any], place: int) -> None:
    response = await client.post("/v1/completions", json=TEXT | {"prompt": prompt})
    refused(response, "prompt")
    assert f"item {place} is no whole number" in response.json()["error"]["message"]


async def test_an_empty_list_of_ids_is_told_as_one(client: httpx.AsyncClient) -> None:
    refusal = (await client.post("/v1/completions", json=TEXT | {"prompt": [[]]})).json()
    assert refusal["error"]["message"].endswith("lists with at least one token id")


async def test_a_compressed_body_is_refused_as_such(client: httpx.AsyncClient) -> None:
    for coding in ("gzip", "br, gzip"):
        body = {"content": gzip.compress(json.dumps(CHAT).encode()), "headers": {"content-encoding": coding}}
        response = await client.post("/v1/chat/completions", **body)  # type: ignore[arg-type]
        assert response.status_code == 400
        assert "content-encoding" in response.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff"])
async def test_bodies_that_are_not_objects(client: httpx.AsyncClient, body: bytes) -> None:
    response = await client.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert "body" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"prompt": [5] * 128}, "prompt"), ({"prompt": [5] * 8, "max_tokens": 121}, "max_tokens")],
)
async def test_more_than_the_context(client: httpx.AsyncClient, changes: dict[str, Any], param: str) -> None:
    response = await client.post("/v1/completions", json=TEXT | changes)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    # These words are all by which LiteLLM knows the error, and sends the call to a model of longer context.
    assert "this model's maximum context length is 128" in error["message"]


async def test_bodies_over_the_limit(client: httpx.AsyncClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b" " * 1000

    declared = await client.post("/v1/completions", content=b" " * 4097)
    counted = await client.post("/v1/completions", content=chunks())
    for response in (declared, counted):
        assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")


async def test_unknown_models_and_paths(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=CHAT | {"model": "gpt-9"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "eyas-nano" in error["message"]
    response = await client.get("/v1/nothing")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    response = await client.get("/v1/completions")
    assert response.status_code == 405 and "message" in response.json()["error"]


@pytest.mark.parametrize(
    "given", ["", "sesame", "Bearer", "Bearer Sesame", "Bearer sesame ", "Bearer schlüssel"]
)
async def test_the_key_is_checked(client: httpx.AsyncClient, given: str) -> None:
    headers = {"authorization": given.encode()}
    for method, path in [("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/tokenize")]:
        response = await client.request(method, path, headers=headers, json=None)
        error = response.json()["error"]
        # LiteLLM takes every invalid_request_error for a bad request, whatever the status.
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert response.status_code == 401
    assert (await client.get("/health", headers=headers)).status_code == 200
    assert (await client.get("/v1/models")).status_code == 200


async def test_request_ids_are_echoed(client: httpx.AsyncClient) -> None:
    for headers in ({}, {"x-request-id": "x" * 129}, {"x-request-id": "a b"}):
        response = await client.get("/health", headers=headers)
        assert len(response.headers["x-request-id"]) == 24
    response = await client.post("/v1/completions", headers={"x-request-id": "mine-1"}, content=b"{")
    assert response.headers["x-request-id"] == "mine-1"
