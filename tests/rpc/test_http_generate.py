"""`/generate` in SGLang's shapes, request timings and deadlines, against a scripted backend."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
import pytest
from http_client import refused
from prometheus_client import CollectorRegistry
from scripted_backend import EOS, ScriptedBackend, ScriptedStream, nano_tokenizer

from eyas.common.config import GatewayConfig
from eyas.common.types import EngineTimings, Role, TokenEntry
from gateway.http.front import create_app
from gateway.observe.metrics import GatewayMetrics
from gateway.text.detokenize import TokenBytes

CONFIG = GatewayConfig(max_body_bytes=4096)
PREFILL = EngineTimings(queue_ms=1.0, prefill_ms=2.0, cached_tokens=1, worker="p:1", role=Role.PREFILL)
DECODE = EngineTimings(
    queue_ms=3.0, transfer_ms=4.0, transfer_bytes=5, transfer_path="shm", worker="d:1", role=Role.DECODE
)


class TimedStream(ScriptedStream):
    """Prefill's timings come with token 0, decode's with an entry that has no news."""

    async def entries(self) -> AsyncGenerator[TokenEntry, None]:
        async for entry in super().entries():
            if entry.index > 0 or entry.choice > 0:
                yield entry
                continue
            yield msgspec.structs.replace(entry, timings=PREFILL)
            yield TokenEntry(entry.id, 1, 0, 0, (), timings=DECODE)


class TimedBackend(ScriptedBackend):
    async def start(self, request: Any) -> TimedStream:
        self.requests.append(request)
        self.streams.append(TimedStream(self, request))
        return self.streams[-1]


@pytest.fixture
def backend() -> TimedBackend:
    return TimedBackend(nano_tokenizer(), stride=1)


@pytest.fixture
async def client(backend: TimedBackend) -> AsyncGenerator[httpx.AsyncClient]:
    app = create_app(CONFIG, backend, backend.tokenizer, GatewayMetrics(CollectorRegistry()))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=10) as client:
        yield client


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_one_text_is_one_object(client: httpx.AsyncClient, backend: TimedBackend) -> None:
    body = (await client.post("/generate", json={"text": "The sun", "rid": "mine"})).json()
    ids = [*backend.tokenizer.encode("Hello, world!", special=False), EOS]
    assert body["text"] == "Hello, world!" and body["output_ids"] == ids
    meta = body["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": EOS}
    assert meta["id"] == "mine"
    assert meta["prompt_tokens"] == len(backend.tokenizer.encode("The sun"))
    assert (meta["completion_tokens"], meta["cached_tokens"]) == (len(ids), 1)
    assert meta["spec_verify_ct"] == len(ids) - 1
    assert meta["spec_accept_length"] == 1 + meta["spec_accept_token_num"] / meta["spec_verify_ct"]
    assert "timings" not in meta and "output_token_logprobs" not in meta


async def test_a_stream_is_cumulative(client: httpx.AsyncClient) -> None:
    ask = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}}
    whole = (await client.post("/generate", json=ask)).json()
    told = events(await client.post("/generate", json=ask | {"stream": True}))
    assert [len(event["output_ids"]) for event in told] == [1, 2, 3]
    assert all(later["text"].startswith(event["text"]) for event, later in zip(told, told[1:], strict=False))
    assert [event["meta_info"]["finish_reason"] for event in told[:-1]] == [None, None]
    last = told[-1]
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    for field in ("completion_tokens", "spec_verify_ct", "spec_accept_length", "cached_tokens"):
        assert last["meta_info"][field] == whole["meta_info"][field]


async def test_batches_are_lists(client: httpx.AsyncClient, backend: TimedBackend) -> None:
    backend.says = lambda request, choice: f"{backend.tokenizer.decode(request.prompt_ids)}{choice}"
    ask = {"text": ["A", "B"], "rid": ["a", "b"], "sampling_params": {"n": 2, "temperature": 0}}
    body = (await client.post("/generate", json=ask)).json()
    assert [item["text"] for item in body] == ["A0", "A1", "B0", "B1"]
    assert [item["meta_info"]["id"] for item in body] == ["a_0", "a_1", "b_0", "b_1"]
    last = {
        event["index"]: event["text"]
        for event in events(await client.post("/generate", json=ask | {"stream": True}))
    }
    assert last == {0: "A0", 1: "A1", 2: "B0", 3: "B1"}
    assert isinstance((await client.post("/generate", json={"input_ids": [[5], [6]]})).json(), list)
    assert isinstance((await client.post("/generate", json={"text": ["A"]})).json(), list)


async def test_logprobs(client: httpx.AsyncClient, backend: TimedBackend) -> None:
    ask = {"text": "x", "return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    body = (await client.post("/generate", json=ask)).json()
    meta, ids = body["meta_info"], body["output_ids"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == ids
    assert meta["output_token_logprobs"][0][2] == "Hello"
    assert meta["output_top_logprobs"][0] == [
        [-0.5, ids[0], "Hello"],
        [-1.5, 7, backend.tokenizer.table.label(7)[0]],
    ]
    plain = (await client.post("/generate", json={"text": "x", "return_logprob": True})).json()["meta_info"]
    assert plain["output_token_logprobs"][0] == [-0.5, ids[0], None]
    assert plain["output_top_logprobs"][0] is None


async def test_a_stream_encodes_each_logprob_once(
    client: httpx.AsyncClient, backend: TimedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events carry all so far, as SGLang's do; what is already told must not be made again."""
    ask = {"text": "x", "return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    whole = (await client.post("/generate", json=ask)).json()["meta_info"]
    label, made = TokenBytes.label, []
    monkeypatch.setattr(TokenBytes, "label", lambda table, id: made.append(id) or label(table, id))
    told = [e["meta_info"] for e in events(await client.post("/generate", json=ask | {"stream": True}))]
    assert len(told) > 2
    for count, meta in enumerate(told, start=1):
        for field in ("output_token_logprobs", "output_top_logprobs"):
            assert meta[field] == whole[field][:count]
    assert len(made) == 3 * len(told)  # each token itself, and its two best


async def test_parameters_reach_the_backend(client: httpx.AsyncClient, backend: TimedBackend) -> None:
    params = {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "top_k": -1,
        "top_p": 0.9,
        "min_p": 0.1,
        "stop": "zebra",
        "stop_token_ids": [4],
        "ignore_eos": True,
        "sampling_seed": 11,
    }
    await client.post("/generate", json={"text": "x", "sampling_params": params, "speculative": False})
    request = backend.requests[0]
    got = request.params
    assert (got.max_tokens, got.min_tokens, got.top_k, got.top_p, got.min_p) == (9, 2, 0, 0.9, 0.1)
    assert (got.stop_token_ids, got.ignore_eos, got.seed) == ((4,), True, 11)
    assert not request.speculative
    await client.post("/generate", json={"text": "x"})
    assert backend.requests[1].params.max_tokens == 128 - len(
        request.prompt_ids
    )  # what fits, of SGLang's 128


async def test_a_stop_string_is_named(client: httpx.AsyncClient) -> None:
    ask = {"text": "x", "sampling_params": {"stop": ["wor", "zebra"]}}
    body = (await client.post("/generate", json=ask)).json()
    assert body["text"] == "Hello, "
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": "wor"}


BAD = [
    ("text", {}),
    ("text", {"text": "x", "input_ids": [1]}),
    ("text", {"text": []}),
    ("input_ids", {"input_ids": [[]]}),
    ("rid", {"text": ["a", "b"], "rid": "one"}),
    ("return_hidden_states", {"text": "x", "return_hidden_states": True}),
    ("logprob_start_len", {"text": "x", "logprob_start_len": -2}),
    ("logprob_start_len", {"text": "x", "return_logprob": True, "logprob_start_len": 9}),
    ("sampling_params.ebnf", {"text": "x", "sampling_params": {"regex": "a+", "ebnf": 'root ::= "a"'}}),
    ("sampling_params.seed", {"text": "x", "sampling_params": {"seed": 1, "sampling_seed": 2}}),
    ("max_new_tokens", {"text": "x", "sampling_params": {"max_new_tokens": 4000}}),
    ("min_new_tokens", {"text": "x", "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}}),
    ("sampling_params.temperature", {"text": "x", "sampling_params": {"temperature": 9}}),
    ("timeout", {"text": "x", "timeout": 0}),
]


@pytest.mark.parametrize(("field", "body"), BAD)
async def test_what_is_wrong_is_named(
    client: httpx.AsyncClient, backend: TimedBackend, field: str, body: dict[str, Any]
) -> None:
    response = await client.post("/generate", json=body)
    refused(response, field)
    assert not backend.requests


async def test_what_is_switched_off_asks_for_nothing(client: httpx.AsyncClient) -> None:
    """What SGLang's own load generator sends."""
    off = {
        "lora_path": None,
        "return_logprob": False,
        "logprob_start_len": 2**40,
        "return_routed_experts": False,
    }
    assert (await client.post("/generate", json={"text": "x"} | off)).status_code == 200


async def test_model_info(client: httpx.AsyncClient) -> None:
    info = (await client.get("/get_model_info")).json()
    assert info["is_generation"] is True and info["model_path"] == CONFIG.model
    assert (info["served_model_name"], info["max_model_len"]) == ("eyas-nano", 128)


# --- timings and deadlines, of every API -------------------------------------------------------------------

CHAT = {"model": "eyas-nano", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "eyas-nano", "prompt": "Hi"}


def check(timings: dict[str, Any]) -> None:
    prefill, decode = timings["legs"]
    assert prefill == {
        "role": "prefill",
        "worker": "p:1",
        "queue_ms": 1.0,
        "prefill_ms": 2.0,
        "cached_tokens": 1,
    }
    assert (decode["role"], decode["worker"], decode["transfer_bytes"]) == ("decode", "d:1", 5)
    assert (decode["transfer_ms"], decode["transfer_path"]) == (4.0, "shm")
    assert "prefill_ms" not in decode
    assert 0 < timings["first_token_ms"] < timings["total_ms"]
    assert timings["first_decode_ms"] > 0
    assert timings["verify_steps"] > 0 and timings["acceptance_length"] >= 1


async def test_no_token_has_no_time(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/completions", json=TEXT | {"timings": True, "max_tokens": 0})
    timings = reply.json()["timings"]
    assert timings["first_token_ms"] is None and timings["first_decode_ms"] is None
    assert timings["total_ms"] > 0


async def test_timings_are_sent_on_request(client: httpx.AsyncClient) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        assert "timings" not in (await client.post(path, json=body)).json()
        whole = (await client.post(path, json=body | {"timings": True})).json()
        check(whole["timings"])
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 1  # the prefill's, not decode's
        told = events(await client.post(path, json=body | {"timings": True, "stream": True}))
        check(told[-1]["timings"])
        assert all("timings" not in event for event in told[:-1])
    asked = {"text": "x", "timings": True}
    check((await client.post("/generate", json=asked)).json()["meta_info"]["timings"])
    told = events(await client.post("/generate", json=asked | {"stream": True}))
    check(told[-1]["meta_info"]["timings"])
    both = await client.post("/v1/completions", json=TEXT | {"prompt": ["a", "b"], "timings": True})
    assert both.json()["error"]["param"] == "timings"


async def test_a_caller_may_shorten_the_deadline(client: httpx.AsyncClient, backend: TimedBackend) -> None:
    backend.pause_s = 5.0
    for path, body in (("/v1/chat/completions", CHAT), ("/generate", {"text": "x"})):
        response = await client.post(path, json=body | {"timeout": 0.05})
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert [request.timeout_s for request in backend.requests] == [0.05, 0.05]
    backend.pause_s = 0.0
    await client.post("/v1/completions", json=TEXT)
    assert backend.requests[-1].timeout_s == CONFIG.request_timeout_s
    longer = await client.post("/v1/completions", json=TEXT | {"timeout": 10**6})
    assert longer.status_code == 400 and longer.json()["error"]["param"] == "timeout"
