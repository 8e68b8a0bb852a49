"""What is absent, neutral, unknown or not supported, on every route that generates; then the small fields."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from http_client import CHAT, GENERATE, ROUTES, TEXT, client_of, events, refused
from scripted_backend import EOS, ScriptedBackend, nano_tokenizer

from gateway.formats.schema import (
    ChatBody,
    ChatMessage,
    DetokenizeBody,
    StreamOptions,
    TextBody,
    TokenizeBody,
)
from gateway.formats.sglang import GenerateBody, SamplingBody

BODIES = {"/v1/chat/completions": ChatBody, "/v1/completions": TextBody, "/generate": GenerateBody}
MESSAGE = CHAT["messages"][0]


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(nano_tokenizer())


@pytest.fixture
async def client(backend: ScriptedBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(backend) as client:
        yield client


# --- null, neutral, unknown, unsupported -----------------------------------------------------------------


async def test_null_means_absent(client: httpx.AsyncClient) -> None:
    for path, kind in BODIES.items():
        names = [name for name, field in kind.model_fields.items() if name not in ROUTES[path]]
        nulls = dict.fromkeys([*names, *kind.unsupported, "unknown_field"])
        response = await client.post(path, json=nulls | ROUTES[path])
        assert response.status_code == 200, response.text
        assert "x-eyas-ignored" not in response.headers
    nested = [
        (
            "/v1/completions",
            TEXT | {"stream": True, "stream_options": dict.fromkeys(StreamOptions.model_fields)},
        ),
        (
            "/v1/chat/completions",
            CHAT | {"messages": [dict.fromkeys(ChatMessage.unsupported) | MESSAGE | {"name": None}]},
        ),
        ("/generate", GENERATE | {"sampling_params": dict.fromkeys([*SamplingBody.model_fields, "regex"])}),
        ("/tokenize", dict.fromkeys(TokenizeBody.model_fields) | {"prompt": "Hi"}),
        ("/detokenize", dict.fromkeys(DetokenizeBody.model_fields) | {"tokens": [5]}),
    ]
    for path, body in nested:
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        assert "x-eyas-ignored" not in response.headers
    for field in ("model", "messages"):
        assert refused(await client.post("/v1/chat/completions", json=CHAT | {field: None}), field)


OPENAI_NEUTRAL: list[dict[str, Any]] = [
    {"best_of": 1},
    {"response_format": {"type": "text"}},
    {"guided_json": {}, "guided_choice": [], "regex": "", "structured_outputs": {}},
    {"top_k": -1},
    {"top_k": 0},
    {"lora_path": ""},
    {"stream_options": None},
    {"stop": []},
    {"logit_bias": {}},
    {"stop_token_ids": []},
    {"bad_words": []},
    {"length_penalty": 1.0, "early_stopping": False, "use_beam_search": False},
    {"logprobs": None, "n": 1, "user": "me", "store": False, "metadata": {}},
]
NEUTRAL = [
    *[(path, field) for path in ("/v1/chat/completions", "/v1/completions") for field in OPENAI_NEUTRAL],
    ("/v1/completions", {"suffix": ""}),
    ("/v1/chat/completions", {"tools": [], "tool_choice": "none", "parallel_tool_calls": True}),
    ("/v1/chat/completions", {"tool_choice": "auto"}),
    ("/v1/chat/completions", {"functions": [], "function_call": "none"}),
    ("/v1/chat/completions", {"modalities": ["text"]}),
    ("/v1/chat/completions", {"top_logprobs": 0}),
    (
        "/v1/chat/completions",
        {"messages": [MESSAGE | {"annotations": [], "tool_calls": [], "refusal": None}]},
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}),
    ("/generate", {"lora_path": "", "return_hidden_states": False, "image_data": [], "modalities": ["text"]}),
    (
        "/generate",
        {"sampling_params": {"top_k": -1, "regex": "", "json_schema": None, "no_stop_trim": False}},
    ),
]


@pytest.mark.parametrize(("path", "field"), NEUTRAL)
async def test_what_asks_for_nothing_changes_nothing(
    client: httpx.AsyncClient, backend: ScriptedBackend, path: str, field: dict[str, Any]
) -> None:
    plain = ROUTES[path] | {"seed": 1} if path != "/generate" else ROUTES[path]
    for body in (plain, plain | field):
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
    first, second = backend.requests
    assert (first.prompt_ids, first.params.top_k) == (second.prompt_ids, second.params.top_k)
    if path != "/generate":
        assert first.params == second.params


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", {"modalities": ["text", "audio"]}, "modalities", "text only"),
    ("/v1/completions", {"multi_modal_data": {"image": "x"}}, "multi_modal_data", "text only"),
    ("/v1/chat/completions", {"messages": [MESSAGE | {"images": ["x"]}]}, "messages[0].images", "text only"),
    ("/v1/chat/completions", {"echo": True}, "echo", "does not begin with its prompt"),
    ("/v1/chat/completions", {"reasoning_effort": "low"}, "reasoning_effort", "knows no effort"),
    ("/v1/chat/completions", {"best_of": True}, "best_of", "ask for n"),
    ("/v1/completions", {"suffix": "x"}, "suffix", "does not fill gaps"),
    ("/v1/completions", {"prompt_logprobs": 1}, "prompt_logprobs", "echo and logprobs"),
    ("/generate", {"lora_id": "a"}, "lora_id", "named as the model"),
    ("/generate", {"return_hidden_states": True}, "return_hidden_states", "not told"),
    ("/generate", {"image_data": "http://x"}, "image_data", "text only"),
    ("/generate", {"sampling_params": {"stop_regex": "a+"}}, "sampling_params.stop_regex", "plain text"),
]


@pytest.mark.parametrize(("path", "field", "param", "reason"), REFUSED)
async def test_what_would_change_the_answer_is_refused_with_a_reason(
    client: httpx.AsyncClient, path: str, field: dict[str, Any], param: str, reason: str
) -> None:
    message = refused(await client.post(path, json=ROUTES[path] | field), param)
    assert message.startswith(f"{param} is not supported: ") and reason in message


async def test_unknown_fields_are_ignored_and_named(client: httpx.AsyncClient) -> None:
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    body = CHAT | {
        "user": "me",
        "temprature": 0,
        "messages": [MESSAGE, {"role": "user", "name": "Ann", "content": [part]}],
    }
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    named = set(response.headers["x-eyas-ignored"].split(", "))
    assert named == {"user", "temprature", "messages[1].content[0].cache_control"}
    options = {"stream": True, "stream_options": {"include_use": True}}
    streamed = await client.post("/v1/chat/completions", json=body | options)
    named.add("stream_options.include_use")
    assert set(streamed.headers["x-eyas-ignored"].split(", ")) == named and events(streamed)
    sampling = {"sampling_params": {"colour": "red"}, "log_metrics": True}
    response = await client.post("/generate", json=GENERATE | sampling)
    assert set(response.headers["x-eyas-ignored"].split(", ")) == {"log_metrics", "sampling_params.colour"}
    response = await client.post("/tokenize", json={"prompt": "Hi", "colour": "red"})
    assert response.headers["x-eyas-ignored"] == "colour"


async def test_a_caller_cannot_write_headers(client: httpx.AsyncClient) -> None:
    odd = {"a\r\nset-cookie: x": 1, "ü, b": 1, "x" * 1000: 1}
    response = await client.post("/v1/completions", json=TEXT | odd)
    assert response.headers["x-eyas-ignored"] == f"a??set-cookie:?x, ???b, {'x' * 64}"
    many = await client.post("/v1/completions", json=TEXT | {f"f{i}": i for i in range(5000)})
    names = many.headers["x-eyas-ignored"].split(", ")
    assert names == [*(f"f{i}" for i in range(32)), "..."]


# --- names of requests, token ids, usage -----------------------------------------------------------------


async def test_a_request_can_be_named(client: httpx.AsyncClient) -> None:
    for field in ("request_id", "rid"):
        chat = await client.post("/v1/chat/completions", json=CHAT | {field: "mine-1"})
        text = await client.post("/v1/completions", json=TEXT | {field: "mine-1"})
        assert (chat.json()["id"], text.json()["id"]) == ("chatcmpl-mine-1", "cmpl-mine-1")
        assert "x-eyas-ignored" not in chat.headers
        for bad in ("", "a b", "ü", "x" * 129, "a\n", 5):
            refused(await client.post("/v1/completions", json=TEXT | {field: bad}), field)
    told = events(await client.post("/v1/completions", json=TEXT | {"rid": "s", "stream": True}))
    assert {event["id"] for event in told} == {"cmpl-s"}
    refused(await client.post("/generate", json=GENERATE | {"rid": "a b"}), "rid[0]")


async def test_two_requests_of_one_name_run_side_by_side(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    for _ in range(2):
        await client.post("/v1/completions", json=TEXT | {"request_id": "twice"})
    assert len({request.id for request in backend.requests}) == 2


async def test_token_ids_are_sent_on_request(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    said = [*backend.tokenizer.encode("Hello, world!", special=False), EOS]
    asked = {"return_token_ids": True, "max_tokens": 50}
    chat = (await client.post("/v1/chat/completions", json=CHAT | asked)).json()
    assert chat["prompt_token_ids"] == list(backend.requests[-1].prompt_ids)
    assert chat["choices"][0]["token_ids"] == said
    text = (await client.post("/v1/completions", json=TEXT | asked | {"prompt": ["A", "BC"], "n": 2})).json()
    prompts = [choice["prompt_token_ids"] for choice in text["choices"]]
    assert prompts == [list(backend.tokenizer.encode(p)) for p in ("A", "A", "BC", "BC")]
    assert all(choice["token_ids"] == said for choice in text["choices"])

    first, *rest = events(await client.post("/v1/chat/completions", json=CHAT | asked | {"stream": True}))
    assert first["prompt_token_ids"] == chat["prompt_token_ids"]
    assert not any("prompt_token_ids" in event for event in rest)
    assert [id for event in rest for id in event["choices"][0]["token_ids"]] == said
    first, *rest = events(await client.post("/v1/completions", json=TEXT | asked | {"stream": True}))
    assert first["choices"][0]["prompt_token_ids"] == list(backend.tokenizer.encode("Hi"))
    assert [id for event in rest for id in event["choices"][0]["token_ids"]] == said

    plain = await client.post("/v1/completions", json=TEXT | {"stream": True})
    assert "token_ids" not in plain.text


async def test_every_event_holds_the_usage_so_far(client: httpx.AsyncClient) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for path in ("/v1/chat/completions", "/v1/completions"):
        *told, last = events(await client.post(path, json=ROUTES[path] | options))
        counts = [event["usage"]["completion_tokens"] for event in told]
        assert counts == sorted(counts) and len(set(counts)) > 2
        assert counts[-1] == last["usage"]["completion_tokens"] and last["choices"] == []
        alone = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
        told = events(await client.post(path, json=ROUTES[path] | alone))
        assert not any("usage" in event for event in told)


# --- prompts ---------------------------------------------------------------------------------------------


async def test_a_prompt_is_cut_to_its_end(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    async def kept(**fields: Any) -> int:
        response = await client.post("/v1/completions", json=TEXT | {"prompt": list(range(5, 205))} | fields)
        assert response.status_code == 200, response.text
        ids = backend.requests[-1].prompt_ids
        assert ids == tuple(range(205 - len(ids), 205))
        return len(ids)

    assert await kept(truncate_prompt_tokens=7) == 7
    assert await kept(truncate_prompt_tokens=-1, max_tokens=28) == 100  # of a context of 128
    assert await kept(truncate_prompt_tokens=-1) == 127
    too_long = TEXT | {"prompt": list(range(5, 205))}
    refused(await client.post("/v1/completions", json=too_long), "prompt")
    refused(await client.post("/v1/completions", json=too_long | {"truncate_prompt_tokens": 128}), "prompt")
    chat = CHAT | {"messages": [MESSAGE | {"content": "word " * 500}], "truncate_prompt_tokens": 9}
    assert (await client.post("/v1/chat/completions", json=chat)).json()["usage"]["prompt_tokens"] == 9
    del chat["truncate_prompt_tokens"]
    refused(await client.post("/v1/chat/completions", json=chat), "messages")
    cut = {"prompt": "one two three", "truncate_prompt_tokens": 1, "echo": True}
    text = (await client.post("/v1/completions", json=TEXT | cut)).json()["choices"][0]["text"]
    assert text == " threeHello, world!"


async def test_special_tokens_around_a_prompt(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    encode = backend.tokenizer.encode
    for special in (True, False):
        await client.post("/v1/completions", json=TEXT | {"add_special_tokens": special})
        assert backend.requests[-1].prompt_ids == encode("Hi", special=special)
        asked = {"prompt": "Hi", "add_special_tokens": special}
        told = (await client.post("/tokenize", json=asked)).json()
        assert tuple(told["tokens"]) == encode("Hi", special=special)


async def test_how_a_chat_becomes_a_prompt(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "The answer is"}]

    async def prompt(**fields: Any) -> str:
        body = CHAT | {"messages": messages, **fields}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        told = await client.post("/tokenize", json={"messages": messages, **fields})
        assert tuple(told.json()["tokens"]) == backend.requests[-1].prompt_ids
        return backend.tokenizer.decode(backend.requests[-1].prompt_ids, skip_special_tokens=False)

    whole = await prompt()
    assert whole.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert await prompt(add_generation_prompt=False) == whole.removesuffix("<|im_start|>assistant\n")
    assert await prompt(chat_template_kwargs={"enable_thinking": False}) == whole
    refused(
        await client.post(
            "/v1/chat/completions",
            json=CHAT | {"add_generation_prompt": True, "continue_final_message": True},
        ),
        "add_generation_prompt",
    )
    reserved = CHAT | {"chat_template_kwargs": {"messages": []}}
    refused(await client.post("/v1/chat/completions", json=reserved), "chat_template_kwargs")


async def test_a_message_is_continued(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "The answer is"}]
    body = CHAT | {"messages": messages, "continue_final_message": True}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    prompt = backend.tokenizer.decode(backend.requests[-1].prompt_ids, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nThe answer is")


# --- text ------------------------------------------------------------------------------------------------


async def test_special_tokens_are_shown_on_request(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.says = lambda request, choice: "a<|im_start|>b"
    for shown in (True, False):
        text = (await client.post("/v1/completions", json=TEXT | {"skip_special_tokens": not shown})).json()
        expected = "a<|im_start|>b" if shown else "ab"
        assert text["choices"][0]["text"] == expected
        sampling = {"skip_special_tokens": not shown, "spaces_between_special_tokens": not shown}
        body = GENERATE | {"sampling_params": sampling}
        assert (await client.post("/generate", json=body)).json()["text"] == expected
        body = {"tokens": [1, 5], "skip_special_tokens": not shown}
        told = (await client.post("/detokenize", json=body)).json()["prompt"]
        assert told.startswith("<|im_start|>") == shown
    matched = TEXT | {"skip_special_tokens": False, "stop": "<|im_start|>"}
    assert (await client.post("/v1/completions", json=matched)).json()["choices"][0]["text"] == "a"


@pytest.mark.parametrize("field", ["include_stop_str_in_output", "no_stop_trim"])
async def test_what_stopped_an_answer_is_shown_on_request(
    client: httpx.AsyncClient, backend: ScriptedBackend, field: str
) -> None:
    for stride in (1, 2, 5):
        backend.stride = stride
        asked = TEXT | {field: True, "stop": ["wor", "world"]}
        assert (await client.post("/v1/completions", json=asked)).json()["choices"][0]["text"] == "Hello, wor"
        told = events(await client.post("/v1/completions", json=asked | {"stream": True}))
        assert "".join(event["choices"][0]["text"] for event in told) == "Hello, wor"
    ended = TEXT | {field: True, "skip_special_tokens": False}
    assert (
        (await client.post("/v1/completions", json=ended)).json()["choices"][0]["text"].endswith("<|im_end|>")
    )
    sampling = {"no_stop_trim": True, "stop": "wor"}
    body = (await client.post("/generate", json=GENERATE | {"sampling_params": sampling})).json()
    assert body["text"] == "Hello, wor" and body["meta_info"]["finish_reason"]["matched"] == "wor"


async def test_bad_words_are_banned_as_the_tokenizer_spells_them(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    encode = backend.tokenizer.encode
    await client.post("/v1/completions", json=TEXT | {"bad_words": ["the", " Paris", "the"]})
    texts = ("the", " the", "Paris", " Paris")
    assert backend.requests[0].params.bad_words == tuple(encode(text, special=False) for text in texts)
    assert len(encode("Paris", special=False)) > len(encode(" Paris", special=False)) == 1
    for bad, param in [
        ([""], "bad_words[0]"),
        ([" "], "bad_words[0]"),
        (["x" * 513], "bad_words[0]"),
        (["x"] * 65, "bad_words"),
        ("word", "bad_words"),
        ([5], "bad_words[0]"),
    ]:
        refused(await client.post("/v1/completions", json=TEXT | {"bad_words": bad}), param)
