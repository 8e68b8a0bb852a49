"""/v1/responses: what is asked, the whole object, the events in their order, and OpenAI's SDK over both."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import pytest
from http_client import client_of, refused
from openai import AsyncOpenAI
from scripted_backend import ScriptedBackend, nano_tokenizer
from tool_models import speaker

from eyas.common.errors import Unavailable
from eyas.common.grammars.notations import GrammarKind
from tests.chat_templates import TOOLS, WEATHER, called, result
from tests.rpc.responses_requests import BODY, CALLS, EVERYTHING, FLAT, PATH, told


def without_ids(value: Any) -> Any:
    """The value without what differs between two answers to one request."""
    if isinstance(value, dict):
        gone = ("id", "item_id", "call_id", "created_at")
        return {name: without_ids(part) for name, part in value.items() if name not in gone}
    return [without_ids(part) for part in value] if isinstance(value, list) else value


def check(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Checks order and fields of a stream's events; gives the response that it ends with."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] in ("completed", "incomplete", "failed")
    final: dict[str, Any] = events[-1]["response"]
    assert {event["response"]["id"] for event in (*events[:2], events[-1])} == {final["id"]}
    assert final["usage"] is not None and events[0]["response"]["output"] == []
    by_item = itertools.groupby(events[2:-1], key=lambda event: event["output_index"])
    groups = [(index, list(group)) for index, group in by_item]
    assert [index for index, _ in groups] == list(range(len(final["output"])))
    for (_, group), item in zip(groups, final["output"], strict=True):
        check_item(group, item)
    return final


def check_item(events: list[dict[str, Any]], item: dict[str, Any]) -> None:
    first, *inner, last = events
    assert first["type"] == "response.output_item.added" and first["item"]["status"] == "in_progress"
    assert last["type"] == "response.output_item.done" and last["item"] == item
    assert first["item"]["id"] == item["id"] and {event["item_id"] for event in inner} == {item["id"]}
    kinds = [event["type"].removeprefix("response.") for event in inner]
    if item["type"] == "function_call":
        name, text = "function_call_arguments", item["arguments"]
        assert kinds == [f"{name}.delta"] * (len(kinds) - 1) + [f"{name}.done"]
        assert inner[-1]["arguments"] == text
    else:
        name, (part,) = item["content"][0]["type"], item["content"]
        text = part["text"]
        deltas = [f"{name}.delta"] * (len(kinds) - 3)
        assert kinds == ["content_part.added", *deltas, f"{name}.done", "content_part.done"]
        assert inner[-2]["text"] == text and inner[-1]["part"] == part
        assert {event["content_index"] for event in inner} == {0}
        if item["type"] == "message":
            assert all("logprobs" in event for event in inner[1:-1]) and part["annotations"] == []
    assert "".join(event["delta"] for event in inner if event["type"].endswith(".delta")) == text


async def ask(dialect: str, text: str, stride: int = 2, **more: Any) -> dict[str, Any]:
    """A whole response; the streamed one must be the same."""
    async with client_of(speaker(dialect, text, stride)) as client:
        whole = await client.post(PATH, json=BODY | more)
        assert whole.status_code == 200, whole.text
        final = check(told(await client.post(PATH, json=BODY | more | {"stream": True})))
    assert without_ids(final) == without_ids(whole.json())
    found: dict[str, Any] = whole.json()
    return found


@pytest.mark.parametrize("stride", [1, 3, 1000])
async def test_reasoning_a_message_and_calls_are_items(stride: int) -> None:
    response = await ask("hermes", EVERYTHING, stride, tools=FLAT)
    thought, message, weather, now = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Is it far?"}]
    assert message["content"][0]["text"] == "Let me look." and message["role"] == "assistant"
    assert weather["name"] == "weather" and json.loads(weather["arguments"]) == {"city": "Köln"}
    assert now["name"] == "now" and now["arguments"] == "{}"
    assert {item["status"] for item in response["output"]} == {"completed"}
    assert (
        response["status"] == "completed" and response["usage"]["output_tokens_details"]["reasoning_tokens"]
    )


async def test_the_response_repeats_its_request() -> None:
    response = await ask("plain", "Hello!", temperature=0.5, metadata={"a": "b"}, instructions="Be brief.")
    assert response["object"] == "response" and response["id"].startswith("resp_")
    assert response["temperature"] == 0.5 and response["metadata"] == {"a": "b"}
    assert response["instructions"] == "Be brief." and response["text"] == {"format": {"type": "text"}}
    assert (response["tool_choice"], response["tools"], response["store"]) == ("auto", [], False)
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


async def test_an_answer_that_is_cut_is_incomplete() -> None:
    response = await ask("hermes", EVERYTHING, 1, tools=FLAT, max_output_tokens=40)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]][-1] == "incomplete"
    empty = await ask("plain", "", 1)
    assert empty["output"][0]["content"][0]["text"] == ""


async def test_log_probabilities() -> None:
    for more in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
        response = await ask("plain", "Hello, world!", **more)
        scored = response["output"][0]["content"][0]["logprobs"]
        assert "".join(token["token"] for token in scored).startswith("Hello, world!")
        assert len(scored[0]["top_logprobs"]) == more.get("top_logprobs", 0)


async def test_items_become_the_chat_that_they_are() -> None:
    backend = speaker("hermes", "Clear.")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Köln?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm"}],
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "a",
            "name": "weather",
            "arguments": '{"city": "Köln"}',
        },
        {"type": "function_call_output", "call_id": "a", "output": '{"sky": "clear"}'},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Clear."}]},
        {"role": "user", "content": "Thanks"},
    ]
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Köln?"},
        called({"city": "Köln"}, "a", reasoning_content="Hm"),
        result("a"),
        {"role": "assistant", "content": "Clear."},
        {"role": "user", "content": "Thanks"},
    ]
    async with client_of(backend) as client:
        response = await client.post(
            PATH, json=BODY | {"input": items, "instructions": "Be brief.", "tools": FLAT}
        )
        assert response.status_code == 200, response.text
        same = await client.post(
            "/v1/chat/completions", json={"model": "eyas-nano", "messages": chat, "tools": TOOLS}
        )
        assert same.status_code == 200, same.text
    first, second = backend.requests
    assert first.prompt_ids == second.prompt_ids


async def test_a_format_and_a_choice_become_a_grammar() -> None:
    schema = {"type": "object", "properties": {"sky": {"type": "string"}}}
    backend = speaker("plain", "{}")
    format = {"type": "json_schema", "name": "sky", "strict": True, "schema": schema}
    async with client_of(backend) as client:
        response = await client.post(PATH, json=BODY | {"text": {"format": format}})
    grammar = backend.requests[0].params.grammar
    assert grammar is not None and json.loads(grammar.text) == schema
    assert response.json()["text"]["format"] == format
    backend = speaker("hermes", CALLS)
    choice = {"type": "function", "name": "weather"}
    async with client_of(backend) as client:
        response = await client.post(PATH, json=BODY | {"tools": FLAT, "tool_choice": choice})
    grammar = backend.requests[0].params.grammar
    assert grammar is not None and grammar.kind is GrammarKind.STRUCTURAL_TAG
    assert response.json()["tool_choice"] == choice
    assert [item["name"] for item in response.json()["output"]] == ["weather"]
    some = {"type": "allowed_tools", "mode": "required", "tools": [choice]}
    async with client_of(backend) as client:
        response = await client.post(PATH, json=BODY | {"tools": FLAT, "tool_choice": some})
    assert response.json()["tool_choice"] == some


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "share no state"),
    ({"conversation": "c"}, "conversation", "share no state"),
    ({"background": True}, "background", "who asked for it"),
    ({"prompt": {"id": "p"}}, "prompt", "no prompts are kept"),
    ({"truncation": "auto"}, "truncation", "refused"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type", "reads messages, calls"),
    ({"input": [{"role": "user"}]}, "input[0].content", "required"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type",
        "input_image",
    ),
    ({"input": 5}, "input", "string or a list"),
    ({"tools": [{"type": 5}]}, "tools[0].type", "function"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.name", "required"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools", "required"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "required"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "wordiness"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort", "knows no effort"),
    ({"max_output_tokens": 200}, "max_output_tokens", "max_output_tokens is 200"),
    ({"input": []}, "input", "at least 1"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "own template"),
]


@pytest.mark.parametrize(("more", "param", "reason"), REFUSED)
async def test_what_has_no_meaning_is_refused_by_name(more: dict[str, Any], param: str, reason: str) -> None:
    async with client_of(ScriptedBackend(nano_tokenizer())) as client:
        assert reason in refused(await client.post(PATH, json=BODY | more), param)


async def test_what_asks_for_nothing_is_accepted() -> None:
    more = {
        "background": False,
        "truncation": "disabled",
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "previous_response_id": None,
    }
    async with client_of(ScriptedBackend(nano_tokenizer())) as client:
        response = await client.post(PATH, json=BODY | more)
        assert response.status_code == 200 and "x-eyas-ignored" not in response.headers
        assert (await client.get("/v1/models/eyas-nano")).json()["id"] == "eyas-nano"
        for path in ("/v1/embeddings", "/v1/rerank", "/v1/score", "/classify"):
            refused(await client.post(path, json={"model": "eyas-nano", "input": "x"}), "model")


async def test_priority_and_conversation_are_passed_on() -> None:
    backend = speaker("plain", "Hello!")
    async with client_of(backend) as client:
        answer = await client.post(PATH, json=BODY | {"priority": -3, "prompt_cache_key": "tea"})
        assert answer.json()["prompt_cache_key"] == "tea" and "x-eyas-ignored" not in answer.headers
        refused(await client.post(PATH, json=BODY | {"priority": 101}), "priority")
    (request,) = backend.requests
    assert (request.priority, request.session) == (-3, "tea")


async def test_a_stream_that_fails_says_so() -> None:
    backend = speaker("plain", "Hello, world!")
    backend.breaks_with = Unavailable("the worker is gone")
    async with client_of(backend) as client:
        events = told(await client.post(PATH, json=BODY | {"stream": True}))
    final = check(events)
    assert events[-1]["type"] == "response.failed" and final["status"] == "failed"
    assert final["error"] == {"code": "server_error", "message": "the worker is gone"}


def sdk(client: httpx.AsyncClient) -> AsyncOpenAI:
    return AsyncOpenAI(api_key="none", base_url="http://gateway/v1", http_client=client, max_retries=0)


async def test_the_sdk_reads_both() -> None:
    tools: Any = [FLAT[0] | {"strict": True}, FLAT[1]]
    async with client_of(speaker("hermes", EVERYTHING, 3)) as client:
        whole = await sdk(client).responses.create(model="eyas-nano", input="Hi", tools=tools)
        async with sdk(client).responses.stream(model="eyas-nano", input="Hi", tools=tools) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_response()
    assert whole.output_text == final.output_text == "Let me look."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert "response.function_call_arguments.delta" in kinds and "response.completed" in kinds
    assert WEATHER["function"]["name"] == getattr(final.output[2], "name", None)
