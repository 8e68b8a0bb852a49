"""`best_of` of /v1/completions: more choices are generated than told, and the likeliest are told."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from http_client import TEXT, client_of
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.common.types import TokenLogprob
from gateway.formats.openai_reply import likeliest
from gateway.text.entries import TextDelta

MEANS = [-0.9, -0.1, -0.5, -0.1]  # of the tokens of a prompt's four choices


@pytest.fixture
def backend() -> ScriptedBackend:
    """Choice c of a prompt says the prompt and c; its tokens have the log-probability MEANS[c]."""
    backend = ScriptedBackend(nano_tokenizer(), scores=lambda choice: MEANS[choice])
    backend.says = lambda request, choice: f"{backend.tokenizer.decode(request.prompt_ids)}{choice}"
    return backend


async def ask(backend: ScriptedBackend, **more: Any) -> httpx.Response:
    async with client_of(backend) as client:
        return await client.post("/v1/completions", json=TEXT | {"prompt": ["A", "B"]} | more)


async def test_the_likeliest_are_told_best_first(backend: ScriptedBackend) -> None:
    body = (await ask(backend, best_of=4, n=3)).json()
    assert [c["text"] for c in body["choices"]] == ["A1", "A3", "A2", "B1", "B3", "B2"]
    assert [c["index"] for c in body["choices"]] == list(range(6))
    assert all(c["logprobs"] is None for c in body["choices"])
    assert all(len(request.choices) == 4 for request in backend.requests)
    assert body["usage"]["completion_tokens"] == 2 * 4 * 3  # of all that were generated: letter, digit, end


async def test_echo_ids_and_scores_are_of_the_choices_told(backend: ScriptedBackend) -> None:
    more = {"echo": True, "return_token_ids": True}
    body = (await ask(backend, best_of=3, **more)).json()
    assert [c["text"] for c in body["choices"]] == ["AA1", "BB1"]
    for choice, letter in zip(body["choices"], "AB", strict=True):
        assert choice["prompt_token_ids"] == list(backend.tokenizer.encode(letter))
    scored = (await ask(backend, best_of=3, logprobs=0)).json()["choices"]
    assert [c["logprobs"]["token_logprobs"] for c in scored] == [[-0.1] * 3] * 2


async def test_as_many_as_asked_for_are_told_as_they_come(backend: ScriptedBackend) -> None:
    for best_of in (1, 2):
        body = (await ask(backend, best_of=best_of, n=2, prompt="A")).json()
        assert [c["text"] for c in body["choices"]] == ["A0", "A1"]
        assert backend.requests[-1].params.logprobs is None
    assert "A0" in (await ask(backend, best_of=2, n=2, prompt="A", stream=True)).text


def test_long_and_short_choices_are_compared_by_token() -> None:
    def choice(number: int, *logprobs: float) -> TextDelta:
        return TextDelta(number, "", (5,) * len(logprobs), tuple(TokenLogprob(p, ()) for p in logprobs))

    short, long, empty = choice(0, -1.0), choice(1, -0.6, -0.6, -0.6), choice(2)
    assert likeliest([short, long], 2, 1) == [long]  # the sums say the other
    assert likeliest([short, empty], 2, 2) == [empty, short]
