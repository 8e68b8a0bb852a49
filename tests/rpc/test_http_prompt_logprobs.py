"""Log-probabilities of prompts over HTTP, as clients read them: a gateway, prefill and decode workers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_client import events
from prometheus_client import CollectorRegistry
from real_worker import real_worker, tiny_config
from scripted_backend import nano_tokenizer
from scripted_cluster import until

from eyas.common.cluster.discovery import registry
from eyas.common.config import EngineConfig, GatewayConfig
from eyas.common.errors import ContextLengthExceeded, InvalidRequest
from eyas.common.params import SamplingParams
from eyas.common.types import Role
from gateway.backends.admission import MAX_PROMPT_LOGPROBS, GenerationOptions, ServedModel, admit
from gateway.backends.generate import ClusterBackend
from gateway.formats import openai_reply, openai_request
from gateway.formats.sglang import SglangFormat
from gateway.http.front import create_app
from gateway.observe.metrics import GatewayMetrics
from gateway.routing.cluster import Cluster
from gateway.text.tokenizer import Tokenizer
from tests.unit.tiny import write_tiny_pair

PROMPT = "The capital of France is Paris, and that of Italy is"
GREEDY = {"model": "eyas-nano", "temperature": 0, "seed": 1234}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return nano_tokenizer()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A random model with the tokenizer's vocabulary; prompts take several chunks."""
    folder: Path = tmp_path_factory.mktemp("models")
    config = dataclasses.replace(tiny_config(folder), pool_dir=str(folder), chunk_tokens=8)
    write_tiny_pair(folder, vocab=4096)
    return config


@contextlib.asynccontextmanager
async def front(tokenizer: Tokenizer, *addresses: str) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway before these workers."""
    cluster = Cluster(registry("static:" + ",".join(addresses)))
    await cluster.start()
    backend = ClusterBackend(cluster)
    config = GatewayConfig(max_body_bytes=1 << 20)
    app = create_app(config, backend, tokenizer, GatewayMetrics(CollectorRegistry()))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        await until(lambda: not backend.health().problem)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=30) as client:
            yield client
    finally:
        await cluster.aclose()


@pytest.fixture
async def client(engine: EngineConfig, tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        real_worker(engine, Role.PREFILL) as prefill,
        real_worker(engine, Role.DECODE) as decode,
        front(tokenizer, prefill.address, decode.address) as client,
    ):
        yield client


async def asked(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def completed(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    return await asked(client, "/v1/completions", **GREEDY, **body)


def log_likelihoods(answer: dict[str, Any], contexts: list[int]) -> list[tuple[float, bool]]:
    """What lm-eval's local-completions makes of an answer: `parse_logprobs` of its openai_completions.py."""
    found = []
    for choice, context in zip(sorted(answer["choices"], key=itemgetter("index")), contexts, strict=True):
        assert context > 0
        own = choice["logprobs"]["token_logprobs"][context:-1]
        top = choice["logprobs"]["top_logprobs"][context:-1]
        greedy = all(value == max(best.values()) for value, best in zip(own, top, strict=True))
        found.append((sum(own), greedy))
    return found


async def test_log_likelihoods_of_an_answer_are_its_own(
    client: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    """What the model says greedily is found to be greedy, and as likely as it said."""
    context = list(tokenizer.encode(PROMPT))
    said = await completed(client, prompt=context, max_tokens=6, logprobs=1, ignore_eos=True)
    own = said["choices"][0]["logprobs"]["token_logprobs"]
    generated = (
        await asked(
            client,
            "/generate",
            input_ids=context,
            sampling_params={"max_new_tokens": 6, "temperature": 0, "ignore_eos": True},
        )
    )["output_ids"]
    other = [(id + 1) % 4096 for id in generated]
    prompts = [context + generated, context + other]
    answer = await completed(client, prompt=prompts, max_tokens=1, logprobs=1, echo=True)
    right, wrong = log_likelihoods(answer, [len(context)] * 2)
    assert right == (sum(own), True)
    assert wrong[0] < right[0] and not wrong[1]


async def test_an_echo_has_openais_shape(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    answer = await completed(client, prompt=PROMPT, max_tokens=5, logprobs=2, echo=True, ignore_eos=True)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert {len(part) for part in logprobs.values()} == {len(ids) + 5}
    assert choice["text"].startswith(PROMPT) and len(choice["text"]) > len(PROMPT)
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert all(1 <= len(best) <= 2 for best in logprobs["top_logprobs"][1:])
    pieces = [tokenizer.decode([id]) for id in ids]
    assert logprobs["tokens"][: len(ids)] == pieces
    for piece, offset in zip(pieces, logprobs["text_offset"], strict=False):
        assert choice["text"][offset : offset + len(piece)] == piece
    assert logprobs["text_offset"][len(ids)] == len(PROMPT)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


async def test_a_streamed_echo_is_the_same(client: httpx.AsyncClient) -> None:
    ask = {"prompt": [PROMPT, "Hello"], "n": 2, "max_tokens": 4, "logprobs": 2, "echo": True}
    whole = await completed(client, **ask)
    reply = await client.post("/v1/completions", json=GREEDY | ask | {"stream": True})
    choices = [{"text": "", "logprobs": {}, "finish_reason": None} for _ in range(4)]
    for event in events(reply):
        (told,) = event["choices"]
        choice = choices[told["index"]]
        choice["text"] += told["text"]
        choice["finish_reason"] = told["finish_reason"]
        for name, part in (told["logprobs"] or {}).items():
            choice["logprobs"].setdefault(name, []).extend(part)
    assert choices == [{k: v for k, v in choice.items() if k != "index"} for choice in whole["choices"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_and_an_echo_are_the_prompt_alone(client: httpx.AsyncClient, stream: bool) -> None:
    ask = GREEDY | {"prompt": PROMPT, "max_tokens": 0, "logprobs": 1, "echo": True}
    if stream:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        echo, end, answer = events(await client.post("/v1/completions", json=ask | options))
        choice = echo["choices"][0] | {"finish_reason": end["choices"][0]["finish_reason"]}
        assert end["choices"][0]["text"] == ""
    else:
        answer = await asked(client, "/v1/completions", **ask)
        (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
async def test_no_tokens_are_an_empty_answer(client: httpx.AsyncClient, path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": GREEDY | {"prompt": PROMPT, "max_tokens": 0, "logprobs": 2},
        "/v1/chat/completions": GREEDY | {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0},
        "/generate": {"text": PROMPT, "sampling_params": {"max_new_tokens": 0}},
    }
    answer = await asked(client, path, **bodies[path])
    if path == "/generate":
        assert (answer["text"], answer["output_ids"]) == ("", [])
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        return
    (choice,) = answer["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert (text, choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("", "length", 0)


async def test_generate_gives_logprobs_of_its_input(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    """As SGLang's `select` asks; from `logprob_start_len` on, whose first token has no number."""
    ids = tokenizer.encode(PROMPT)
    ask = {"text": PROMPT, "return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    echo = (await completed(client, prompt=PROMPT, max_tokens=0, logprobs=2, echo=True))["choices"][0]
    for start in (0, 3, len(ids) - 1):
        answer = await asked(
            client, "/generate", **ask, logprob_start_len=start, sampling_params={"max_new_tokens": 0}
        )
        meta = answer["meta_info"]
        values, tokens, texts = zip(*meta["input_token_logprobs"], strict=True)
        assert (values[0], meta["input_top_logprobs"][0]) == (None, None)
        assert list(values[1:]) == echo["logprobs"]["token_logprobs"][start + 1 :]
        assert (tokens, list(texts)) == (ids[start:], echo["logprobs"]["tokens"][start:])
        tops = [{text: value for value, _, text in reversed(top)} for top in meta["input_top_logprobs"][1:]]
        assert tops == echo["logprobs"]["top_logprobs"][start + 1 :]
        assert meta["output_token_logprobs"] == []
    whole = await asked(client, "/generate", **ask, logprob_start_len=-1)
    assert whole["meta_info"]["input_token_logprobs"] == []


async def test_every_generate_event_repeats_them(client: httpx.AsyncClient) -> None:
    """SGLang's clients read the last event."""
    ask = {"text": PROMPT, "return_logprob": True, "logprob_start_len": 0, "stream": True}
    chunks = events(await client.post("/generate", json=ask | {"sampling_params": {"max_new_tokens": 3}}))
    told = [chunk["meta_info"]["input_token_logprobs"] for chunk in chunks]
    assert len(told) > 1 and all(each == told[0] and len(each) > 1 for each in told)


@pytest.mark.slow
async def test_a_prefill_that_dies_is_asked_again_elsewhere(
    engine: EngineConfig, tokenizer: Tokenizer
) -> None:
    """Long prompts are being scored when their worker goes: every answer has every number once."""
    prompts = [[(i * j) % 4000 + 5 for j in range(1, 500)] for i in range(1, 5)]
    ask = {"prompt": prompts, "max_tokens": 0, "logprobs": 1, "echo": True}
    async with (
        real_worker(engine, Role.PREFILL) as dying,
        real_worker(engine, Role.DECODE) as decode,
    ):
        async with front(tokenizer, dying.address, decode.address) as client:
            expected = await completed(client, **ask)
    async with real_worker(engine, Role.PREFILL) as dying, real_worker(engine, Role.DECODE) as decode:
        async with front(tokenizer, dying.address, decode.address) as client:
            asking = asyncio.create_task(completed(client, **ask))
            await until(lambda: dying.load.running > 0)
            await dying.front.stop()
            found = await asking
            assert decode.load.pulls_failed > 0, "it was done before it died"
    assert found["choices"] == expected["choices"]


def test_logprobs_of_one_prompt_are_bounded() -> None:
    model = ServedModel("m", context_length=1 << 20, vocab_size=9, fingerprint="")
    prompt, params = (1,) * (MAX_PROMPT_LOGPROBS // 2 + 1), SamplingParams(prompt_logprobs=1)
    admit(model, prompt[1:], GenerationOptions(params, max_tokens=0), 9.0)
    with pytest.raises(InvalidRequest, match="too many") as refused:
        admit(model, prompt, GenerationOptions(params, max_tokens=0), 9.0)
    assert refused.value.param == "prompt_logprobs"
    tail = SamplingParams(prompt_logprobs=1, prompt_logprobs_start=1)
    admit(model, prompt, GenerationOptions(tail, max_tokens=0), 9.0)


def test_no_tokens_may_be_asked_after_a_full_context() -> None:
    model = ServedModel("m", context_length=4, vocab_size=9, fingerprint="")
    assert admit(model, (1,) * 4, GenerationOptions(max_tokens=0), 9.0).params.max_tokens == 0
    for max_tokens in (None, 1):
        with pytest.raises(ContextLengthExceeded):
            admit(model, (1,) * 4, GenerationOptions(max_tokens=max_tokens), 9.0)


@pytest.mark.parametrize("stream", [False, True])
async def test_long_prompts_do_not_hold_up_other_streams(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """All that looks at every token of them runs beside the event loop."""
    told: list[threading.Thread] = []

    def noting(work: Any) -> Any:
        def noted(*args: Any) -> Any:
            told.append(threading.current_thread())
            return work(*args)

        return noted

    monkeypatch.setattr(openai_request, "_echo", noting(openai_request._echo))
    monkeypatch.setattr(openai_reply, "text_logprobs", noting(openai_reply.text_logprobs))
    monkeypatch.setattr(SglangFormat, "_inputs", noting(SglangFormat._inputs))
    openai = GREEDY | {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 2, "stream": stream}
    assert (await client.post("/v1/completions", json=openai)).status_code == 200
    assert len(told) >= 3
    sglang = {"text": PROMPT, "return_logprob": True, "logprob_start_len": 0, "stream": stream}
    sglang["sampling_params"] = {"max_new_tokens": 2}
    assert (await client.post("/generate", json=sglang)).status_code == 200
    assert threading.main_thread() not in told
