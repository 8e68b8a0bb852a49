"""What the gRPC API tells of an answer beside its tokens, and the options that change its prompt and text."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator

import pytest
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.client import AsyncClient, InvalidRequest, Options, WorkerTimings
from eyas.common.types import EngineTimings, PromptTokenLogprobs, Role, TokenLogprob
from tests.rpc.sdk_front import CHAT, served

PREFILL = EngineTimings(1.5, 20.0, cached_tokens=3, worker="a:1", role=Role.PREFILL)
PULLED = EngineTimings(0.5, 0.0, 2.0, 4096, "shm", worker="b:1", role=Role.DECODE)


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(nano_tokenizer(), timings=PREFILL)


@pytest.fixture
async def client(backend: ScriptedBackend) -> AsyncIterator[AsyncClient]:
    async with served(backend) as address, AsyncClient(address, retries=0) as client:
        yield client


async def test_an_answer_has_its_requests_name(client: AsyncClient, backend: ScriptedBackend) -> None:
    backend.pause_s = 0.05
    async with client.chat_stream(CHAT) as stream:
        assert stream.request_id == ""
        await anext(stream)
        assert stream.request_id == backend.requests[0].id and stream.timings.total_ms == 0
        reply = await stream.completion()
    assert reply.request_id == backend.requests[0].id


async def test_an_answer_says_where_its_time_went(client: AsyncClient, backend: ScriptedBackend) -> None:
    backend.pause_s = 0.02
    reply = await client.chat(CHAT)
    assert reply.usage.cached_tokens == 3
    timings = reply.timings
    assert timings.first_decode_ms is not None
    assert 0 < timings.first_token_ms <= timings.first_token_ms + timings.first_decode_ms < timings.total_ms
    assert timings.workers == (WorkerTimings("prefill", "a:1", 1.5, 20.0, 3, None, None, None),)
    backend.timings = PULLED
    (pulled,) = (await client.generate("x")).timings.workers
    assert pulled == WorkerTimings("decode", "b:1", 0.5, None, 0, 2.0, 4096, "shm")


async def test_one_token_has_no_decoding(client: AsyncClient) -> None:
    assert (await client.generate("x", max_tokens=1)).timings.first_decode_ms is None


async def test_no_token_has_no_time(client: AsyncClient) -> None:
    reply = await client.generate("x", max_tokens=0)
    assert reply.usage.completion_tokens == 0
    assert reply.timings.first_token_ms == 0 and reply.timings.first_decode_ms is None


async def test_prompt_logprobs(client: AsyncClient, backend: ScriptedBackend) -> None:
    """Rows after the asked position, each with its token and the best ones of its place."""
    ids = backend.tokenizer.encode("one two three four")
    rows = [(-0.25 * i, (7 + i, -0.5), (9, -1.0)) for i in range(len(ids) - 2)]
    backend.prompt = PromptTokenLogprobs(
        2,
        struct.pack(f"<{len(rows)}f", *(row[0] for row in rows)),
        struct.pack(f"<{2 * len(rows)}i", *(id for row in rows for id, _ in row[1:])),
        struct.pack(f"<{2 * len(rows)}f", *(value for row in rows for _, value in row[1:])),
    )
    reply = await client.generate(ids, prompt_logprobs=2, prompt_logprobs_start=1)
    params = backend.requests[0].params
    assert (params.prompt_logprobs, params.prompt_logprobs_start) == (2, 1)
    found = reply.prompt_logprobs
    assert found is not None and (found.start, found.tokens) == (2, ids[2:])
    assert found.logprobs == tuple(TokenLogprob(own, tuple(best)) for own, *best in rows)
    assert (await client.generate(ids)).prompt_logprobs is None


async def test_options_of_prompt_and_text(client: AsyncClient, backend: ScriptedBackend) -> None:
    ids = backend.tokenizer.encode("one two three four")
    stopped = await client.generate(
        ids, bad_words=["world"], truncate_prompt_tokens=2, stop=["wor"], include_stop_str_in_output=True
    )
    (request,) = backend.requests
    assert request.prompt_ids == ids[-2:]
    assert request.params.bad_words == await backend.tokenizer.spellings(["world"])
    assert stopped.text == "Hello, wor"
    await client.generate(ids, bad_words="world")  # one text, not five letters
    assert backend.requests.pop().params.bad_words == request.params.bad_words
    shown = await client.generate(ids, skip_special_tokens=False, include_stop_str_in_output=True)
    assert shown.text.startswith("Hello, world!<") and shown.text.endswith(">")


BAD: list[tuple[str, Options]] = [
    ("bad_words", {"bad_words": [" "]}),
    ("bad_words", {"bad_words": ["x"] * 65}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("prompt_logprobs_start", {"prompt_logprobs": 0, "prompt_logprobs_start": 100}),
]


@pytest.mark.parametrize(("field", "options"), BAD)
async def test_what_makes_no_sense_is_named(
    client: AsyncClient, backend: ScriptedBackend, field: str, options: Options
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await client.generate("x", **options)
    assert refused.value.param == field and field in refused.value.message
    assert not backend.requests
