"""A prompt that was read as an array is answered, and refused, as one that was read as a list."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from http_client import TEXT, client_of
from scripted_backend import ScriptedBackend, nano_tokenizer

from gateway.http import long_ids
from tests.rpc.scripted_backend import WireBackend

IDS = list(range(300, 340))
COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"stream": True},
    {"return_token_ids": True, "stream": True, "include_usage": True},
    {"return_token_ids": True, "n": 2, "seed": 3},
    {"echo": True},
    {"echo": True, "logprobs": 2},
    {"logprobs": 1, "stream": True},
    {"truncate_prompt_tokens": 8, "echo": True},
    {"truncate_prompt_tokens": -1, "max_tokens": 100},
    {"max_tokens": 100},
    {"prompt": [*IDS, 1 << 20]},
    {"prompt": [IDS, IDS]},
]
GENERATES: list[dict[str, Any]] = [
    {},
    {"stream": True, "rid": "mine"},
    {"return_logprob": True, "logprob_start_len": 3, "top_logprobs_num": 2, "return_text_in_logprobs": True},
    {"sampling_params": {"n": 2, "max_new_tokens": 3}},
    {"input_ids": [1 << 20, *IDS]},
    {"input_ids": [IDS]},
    {"text": "both"},
]
CASES = [
    *(("/v1/completions", TEXT | {"prompt": IDS, "max_tokens": 5} | more) for more in COMPLETIONS),
    *(("/generate", {"input_ids": IDS} | more) for more in GENERATES),
]


@pytest.fixture
async def clients() -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedBackend]]:
    backend = WireBackend(nano_tokenizer())
    async with client_of(backend) as client:
        yield client, backend


@pytest.mark.parametrize(("path", "body"), CASES)
async def test_the_answer_is_the_same(
    clients: tuple[httpx.AsyncClient, ScriptedBackend],
    path: str,
    body: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, backend = clients
    plain = await client.post(path, json=body)
    asked = [list(request.prompt_ids) for request in backend.requests]
    monkeypatch.setattr(long_ids, "LONG_BYTES", 1)
    apart = await client.post(path, json=body)
    assert (apart.status_code, _steady(apart.text)) == (plain.status_code, _steady(plain.text))
    later = backend.requests[len(asked) :]
    assert [list(request.prompt_ids) for request in later] == asked
    flat = isinstance(body.get("prompt", body.get("input_ids", [[]]))[0], int)
    assert all(isinstance(request.prompt_ids, tuple) != flat for request in later)


def _steady(text: str) -> str:
    """Without ids and times of the answer."""
    text = re.sub(r'"(id|created|e2e_latency)":("[^"]*"|[0-9.e-]+)', "", text)
    return re.sub(r"cmpl-\w+", "", text)
