"""The HTTP front against a scripted backend, in process: statuses, bodies, events."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from scripted_backend import INFO, ScriptedBackend, nano_tokenizer

from eyas.common.config import GatewayConfig
from eyas.common.errors import Overloaded, TransferFailed, Unavailable
from eyas.common.types import RequestDraftLimits
from gateway.http.front import create_app
from gateway.observe.metrics import GatewayMetrics

CHAT = {"model": "eyas-nano", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "eyas-nano", "prompt": "Hi"}
CONFIG = GatewayConfig(max_body_bytes=4096)


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(nano_tokenizer())


def client_of(backend: ScriptedBackend, config: GatewayConfig = CONFIG) -> httpx.AsyncClient:
    app = create_app(config, backend, backend.tokenizer, GatewayMetrics(CollectorRegistry()))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=10)


@pytest.fixture
async def client(backend: ScriptedBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(backend) as client:
        yield client


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_a_chat_is_answered_as_one_object(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 200
    body = response.json()
    tokens = len(backend.tokenizer.encode("Hello, world!")) + 1
    assert body["object"] == "chat.completion"
    assert body["system_fingerprint"] == "fp_0123456789ab"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello, world!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = backend.tokenizer.encode("<|endoftext|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert backend.requests[0].prompt_ids == prompt
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["completion_tokens"] == tokens
    assert usage["total_tokens"] == len(prompt) + tokens
    details = usage["completion_tokens_details"]
    assert 0 < details["accepted_prediction_tokens"] < tokens
    assert details["rejected_prediction_tokens"] > 0
    assert backend.streams[0].closed.is_set()


async def test_a_chat_is_streamed(client: httpx.AsyncClient) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await client.post("/v1/chat/completions", json=CHAT | options)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last, done = events(response)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hello, world!"
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "stop"
    assert all(c["usage"] is None for c in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0
    whole = await client.post("/v1/chat/completions", json=CHAT)
    assert last["usage"] == whole.json()["usage"]


async def test_usage_is_only_streamed_on_request(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json=TEXT | {"stream": True})
    *chunks, done = events(response)
    assert done == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks)


async def test_prompts_and_choices_are_numbered_together(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.says = lambda request, choice: f"{backend.tokenizer.decode(request.prompt_ids)}{choice}"
    ask = {"model": "eyas-nano", "prompt": ["A", "B"], "n": 2, "echo": True, "temperature": 0}
    response = await client.post("/v1/completions", json=ask)
    assert [c["text"] for c in response.json()["choices"]] == ["AA0", "AA1", "BB0", "BB1"]
    assert [c["index"] for c in response.json()["choices"]] == [0, 1, 2, 3]
    streamed = ["", "", "", ""]
    for chunk in events(await client.post("/v1/completions", json=ask | {"stream": True}))[:-1]:
        choice = chunk["choices"][0]
        streamed[choice["index"]] += choice["text"]
    assert streamed == ["AA0", "AA1", "BB0", "BB1"]
    assert len({request.params.seed for request in backend.requests}) == len(backend.requests)


async def test_a_refused_prompt_cancels_the_admitted_ones(backend: ScriptedBackend) -> None:
    start = backend.start

    async def second_refused(request: Any) -> Any:
        if backend.requests:
            raise Overloaded("the queue is full")
        return await start(request)

    backend.start = second_refused  # type: ignore[method-assign]
    async with client_of(backend) as client:
        response = await client.post("/v1/completions", json=TEXT | {"prompt": ["A", "B"]})
    assert response.status_code == 429
    assert backend.streams[0].closed.is_set()


async def test_the_prompts_of_one_call_are_one_call(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    for _ in range(2):
        await client.post("/v1/completions", json=TEXT | {"prompt": ["A", "B"]})
    one, same, *others = [request.call for request in backend.requests]
    assert one and one == same and one not in others


async def test_a_call_is_made_in_the_name_of_its_key(backend: ScriptedBackend) -> None:
    async with client_of(backend, GatewayConfig(api_keys=("one", "two"))) as client:
        for key in ("one", "two", "one"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.post("/v1/completions", json=TEXT, headers=headers)).status_code == 200
    first, second, third = [request.caller for request in backend.requests]
    assert first == third != second and "one" not in first


async def test_a_stop_string_ends_its_choice_only(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.stride = 3
    backend.says = lambda request, choice: "one two three four five"[choice * 8 :]
    ask = CHAT | {"n": 2, "stop": ["three", "zebra"]}
    body = (await client.post("/v1/chat/completions", json=ask)).json()
    assert [c["message"]["content"] for c in body["choices"]] == ["one two ", ""]
    assert [c["finish_reason"] for c in body["choices"]] == ["stop", "stop"]
    encode = backend.tokenizer.encode
    counted = len(encode("one two three")) + len(encode("three"))
    assert body["usage"]["completion_tokens"] == counted
    assert backend.streams[0].cancelled[-1] is None  # the last open choice ends the request
    assert backend.streams[0].cancelled[:-1] in ([0], [1])


async def test_logprobs_of_a_chat(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    body = (
        await client.post("/v1/chat/completions", json=CHAT | {"logprobs": True, "top_logprobs": 2})
    ).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    assert bytes(b for item in content[:-1] for b in item["bytes"]) == b"Hello, world!"
    assert content[-1]["token"] == "<|im_end|>"
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]
    assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]
    none = await client.post("/v1/chat/completions", json=CHAT | {"logprobs": True})
    assert none.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_logprobs_of_a_completion(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.says = lambda request, choice: "naïve \U0001f642"
    ask = TEXT | {"logprobs": 1, "max_tokens": 50}
    whole = (await client.post("/v1/completions", json=ask)).json()["choices"][0]
    scored = whole["logprobs"]
    for token, start in zip(scored["tokens"], scored["text_offset"], strict=True):
        assert token.startswith("bytes:") or token == "<|im_end|>" or whole["text"][start:].startswith(token)
    assert any(token.startswith("bytes:\\x") for token in scored["tokens"])
    chunks = events(await client.post("/v1/completions", json=ask | {"stream": True}))[:-1]
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for part in parts for item in part[field]] == scored[field]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_a_real_status(
    client: httpx.AsyncClient, backend: ScriptedBackend, path: str, stream: bool
) -> None:
    backend.refusal = Overloaded("the queue is full")
    body = CHAT if "chat" in path else TEXT
    response = await client.post(path, json=body | {"stream": stream})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    error = response.json()["error"]
    assert error == {
        "message": "the queue is full",
        "type": "rate_limit_error",
        "param": None,
        "code": "overloaded",
    }


async def test_a_failure_in_the_middle(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.breaks_with = TransferFailed("pages were lost")
    whole = await client.post("/v1/chat/completions", json=CHAT)
    assert (whole.status_code, whole.json()["error"]["code"]) == (502, "transfer_failed")
    streamed = events(await client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
    assert "choices" in streamed[0]
    assert streamed[-2]["error"]["message"] == "pages were lost" and streamed[-1] == "[DONE]"
    backend.breaks_with = ZeroDivisionError("secret detail")
    whole = await client.post("/v1/chat/completions", json=CHAT)
    assert whole.status_code == 500 and "secret" not in whole.text
    assert whole.headers["x-request-id"]
    streamed = events(await client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
    assert streamed[-2]["error"] == whole.json()["error"]


async def test_a_deadline_ends_a_call(backend: ScriptedBackend) -> None:
    backend.pause_s = 30
    async with client_of(backend, dataclasses.replace(CONFIG, request_timeout_s=0.1)) as client:
        whole = await client.post("/v1/chat/completions", json=CHAT)
        assert whole.status_code == 504
        streamed = events(await client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
    assert streamed[-2]["error"]["code"] == "deadline_exceeded"
    assert all(stream.closed.is_set() for stream in backend.streams)


async def test_parameters_reach_the_backend(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    asked: dict[str, Any] = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": -1,
        "ignore_eos": True,
    }
    lists = {"logit_bias": {"5": 2}, "stop_token_ids": [4], "speculative": False, "user": "me", "tools": None}
    response = await client.post("/v1/chat/completions", json=CHAT | asked | lists)
    assert response.status_code == 200
    request = backend.requests[0]
    for name, value in (asked | {"seed": 2**64 - 1}).items():
        assert getattr(request.params, name) == value
    assert request.params.logit_bias == {5: 2.0}
    assert request.params.stop_token_ids == (4,)
    assert request.speculative is False
    await client.post("/v1/chat/completions", json=CHAT)
    room = INFO.context_length - len(backend.requests[1].prompt_ids)
    assert backend.requests[1].params.max_tokens == room
    assert backend.requests[1].params.temperature == 1.0
    await client.post("/v1/completions", json=TEXT)
    assert backend.requests[2].params.max_tokens == 16


async def test_a_request_limits_its_own_drafts(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    """Or turns them off; what is not said is for the server to say."""
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", TEXT),
        ("/generate", {"text": "x"}),
    ):
        backend.requests.clear()
        for speculative in (True, False, {"steps": 3, "topk": 1}, {"draft_tokens": 2}):
            assert (await client.post(path, json=body | {"speculative": speculative})).status_code == 200
        assert [request.speculative for request in backend.requests] == [True, False, True, True]
        limits = [request.draft_limits for request in backend.requests]
        assert limits == [
            RequestDraftLimits(),
            RequestDraftLimits(),
            RequestDraftLimits(3, 1),
            RequestDraftLimits(0, 0, 2),
        ]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"steps": 0}, "speculative.steps"),
        ({"topk": "many"}, "speculative.topk"),
        ({"draft_tokens": 1}, "speculative.draft_tokens"),
        (3, "speculative"),
    ],
)
async def test_limits_that_make_no_sense_are_refused_by_name(
    client: httpx.AsyncClient, wrong: Any, field: str
) -> None:
    response = await client.post("/v1/completions", json=TEXT | {"speculative": wrong})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field and field in response.json()["error"]["message"]


async def test_health_follows_the_backend(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    assert (await client.get("/health")).status_code == 200
    assert 'eyas_serving{model_name="eyas-nano"} 1.0' in (await client.get("/metrics")).text
    other = await client.get("/metrics/", headers={"host": "elsewhere.example"})
    assert other.status_code in (403, 404) and "location" not in other.headers
    backend.is_healthy = False
    response = await client.get("/health")
    assert (response.status_code, response.json()["error"]["message"]) == (503, "no worker is serving")
    assert 'eyas_serving{model_name="eyas-nano"} 0.0' in (await client.get("/metrics")).text
    backend.infos = []
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert (response.status_code, response.json()["error"]["code"]) == (503, Unavailable.code)


async def test_the_cluster_is_described(client: httpx.AsyncClient) -> None:
    told = (await client.get("/cluster")).json()
    assert told["model"] == "eyas-nano" and told["health"] == {"problem": "", "degraded": "", "paused": ""}
    (worker,) = told["workers"]
    assert (worker["worker"], worker["roles"]) == (INFO.worker, ["prefill", "decode"])
    assert (worker["epoch"], worker["connected"], worker["in_flight"]) == ("1", True, 0)


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert [(m["id"], m["max_model_len"]) for m in listed["data"]] == [("eyas-nano", 128)]
    assert (await client.get("/v1/models/eyas-nano")).json() == listed["data"][0]
    assert (await client.get("/v1/models/")).json() == listed
    missing = await client.get("/v1/models/other/model")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_tokenize_and_back(client: httpx.AsyncClient) -> None:
    body = (await client.post("/tokenize", json={"prompt": "Hello, naïve \U0001f642"})).json()
    assert body["count"] == len(body["tokens"])
    back = await client.post("/detokenize", json={"tokens": body["tokens"]})
    assert back.json() == {"prompt": "Hello, naïve \U0001f642"}
    chat = (await client.post("/tokenize", json={"messages": CHAT["messages"]})).json()
    assert chat["tokens"][:2] == [0, 1]
    assert (await client.post("/detokenize", json={"tokens": [-1]})).status_code == 400
    assert (await client.post("/tokenize", json={})).status_code == 400


async def test_metrics_count_what_was_served(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    usage = (await client.post("/v1/chat/completions", json=CHAT)).json()["usage"]
    await client.get("/nowhere/in/particular")
    name = 'model_name="eyas-nano"'
    page = (await client.get("/metrics")).text.replace(f"{{{name}}}", "").replace(f"{name},", "")
    assert f"eyas_generation_tokens_total {float(usage['completion_tokens'])}" in page
    assert f"eyas_prompt_tokens_total {float(usage['prompt_tokens'])}" in page
    assert 'eyas_http_responses_total{path="/v1/chat/completions",status="200"} 1.0' in page
    assert 'eyas_http_responses_total{path="other",status="404"} 1.0' in page
    assert "eyas_time_to_first_token_seconds_count 1.0" in page
    assert "eyas_requests_running 0.0" in page
