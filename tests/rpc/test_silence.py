"""No token limit but the context's, no time limit while tokens come, bodies as long as the context needs."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from http_client import client_of
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.common.config import GatewayConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from gateway.backends.admission import GenerationOptions, ServedModel, admit
from gateway.backends.running import SilenceLimit
from gateway.http.wire import LEAST_BODY_BYTES, body_limit


def admitted(options: GenerationOptions) -> GenerationRequest:
    model = ServedModel(id="m", context_length=131_072, vocab_size=4096, fingerprint="f")
    return admit(model, [1] * 72, options, timeout_s=1.0)


def test_an_answer_may_fill_the_context() -> None:
    assert admitted(GenerationOptions()).params.max_tokens == 131_000
    assert admitted(GenerationOptions(SamplingParams(), 9)).params.max_tokens == 9
    assert admitted(GenerationOptions(default_max_tokens=16)).params.max_tokens == 16


async def test_tokens_that_come_extend_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.backends.running.SILENCE_S", 0.05)
    tokens, looks = 0, 0

    def count() -> int:
        nonlocal tokens, looks
        looks += 1
        tokens += looks < 5  # later looks see no more tokens
        return tokens

    limit = asyncio.timeout(60.0)
    silence = SilenceLimit(limit, count)
    with pytest.raises(TimeoutError):
        async with limit:
            await asyncio.Event().wait()
    assert silence.expired and looks == 5


def test_a_body_may_hold_a_prompt_that_fills_the_context() -> None:
    assert body_limit(2048) == LEAST_BODY_BYTES
    assert body_limit(1 << 20) == 16 << 20


async def test_the_limit_of_a_body_follows_the_context() -> None:
    backend = ScriptedBackend(nano_tokenizer())
    async with client_of(backend, GatewayConfig()) as client:
        long = {"model": "eyas-nano", "prompt": "x" * LEAST_BODY_BYTES}
        refused: httpx.Response = await client.post("/v1/completions", json=long)
    assert refused.status_code == 413
