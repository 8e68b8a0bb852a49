"""/v1/messages: what is asked, whole messages, events in their order, errors, and Anthropic's SDK over it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from http_client import client_of
from scripted_backend import ScriptedBackend, nano_tokenizer
from tool_models import speaker, tokenizer_of

from eyas.common.config import GatewayConfig
from eyas.common.errors import Unavailable
from tests.chat_templates import WEATHER

MODEL = "eyas-nano"
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "Hi"}]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
RAIN = [{"type": "text", "text": "rain"}]
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}
TOOL = {
    "name": "weather",
    "description": "The sky.",
    "input_schema": WEATHER["function"]["parameters"],
    "cache_control": {"type": "ephemeral"},
}


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def post(backend: ScriptedBackend, path: str = "/v1/messages", **changes: Any) -> httpx.Response:
    async with client_of(backend, GatewayConfig()) as client:
        return await client.post(path, json=BODY | changes)


def prompt_of(backend: ScriptedBackend) -> str:
    return backend.tokenizer.decode(backend.requests[-1].prompt_ids, skip_special_tokens=False)


async def test_a_whole_message() -> None:
    backend = speaker("hermes", "Good day.")
    told = (await post(backend, metadata={"user_id": "x"})).json()
    assert told["content"] == [{"type": "text", "text": "Good day."}]
    assert (told["type"], told["role"], told["model"]) == ("message", "assistant", MODEL)
    assert told["id"].startswith("msg_") and (told["stop_reason"], told["stop_sequence"]) == (
        "end_turn",
        None,
    )
    request = backend.requests[-1]
    assert request.params.max_tokens == 200
    assert told["usage"]["input_tokens"] == len(request.prompt_ids)
    assert told["usage"]["output_tokens"] > 3


async def test_thought_text_and_call_are_blocks_whole_and_streamed() -> None:
    backend = speaker("hermes", f"<think>\nIs it far?\n</think>\n\nLet me look.\n{CALL}")
    whole = (await post(backend, tools=[TOOL])).json()
    thought, text, call = whole["content"]
    assert thought["type"] == "thinking" and "Is it far?" in thought["thinking"] and "signature" in thought
    assert text["type"] == "text" and text["text"].startswith("Let me look.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Köln"})
    assert whole["stop_reason"] == "tool_use"

    events = events_of(await post(backend, tools=[TOOL], stream=True))
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2] == list(range(kinds.count("content_block_stop")))
    streamed = "".join(
        event["delta"]["partial_json"]
        for event in events
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta"
    )
    assert json.loads(streamed) == call["input"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


async def test_blocks_become_the_messages_that_the_template_reads() -> None:
    backend = speaker("hermes", "So.")
    await post(
        backend,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        tools=[TOOL, SEARCH],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Sky?"}]},
            {"role": "user", "content": "In Köln."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Köln"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [{"type": "text", "text": "rain"}],
                    },
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
    )
    prompt = prompt_of(backend)
    for part in ("Be brief.", "Sky?\nIn Köln.", '"city": "Köln"', "rain", "And now?"):
        assert part in prompt
    assert prompt.index("rain") < prompt.index("And now?") and "web_search" not in prompt


async def test_documents_of_text_are_read() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    blocks = {
        "type": "content",
        "content": [{"type": "text", "text": "Snow"}, {"type": "text", "text": "falls."}],
    }
    cited = {"type": "document", "source": plain, "title": "Köln", "context": "Of today", "citations": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "document", "source": blocks}],
    }
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
    backend = speaker("hermes", "So.")
    await post(
        backend,
        tools=[TOOL],
        messages=[
            {"role": "user", "content": [cited, {"type": "text", "text": "And Bonn?"}]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    )
    prompt = prompt_of(backend)
    assert "Köln\nOf today\nIt rains.\nAnd Bonn?" in prompt and "Snow\nfalls." in prompt


@pytest.mark.parametrize(
    ("source", "param"),
    [
        ({"type": "base64", "media_type": "application/pdf", "data": "JVBE"}, "source.type"),
        ({"type": "text"}, "source.data"),
        ({"type": "content"}, "source.content"),
        ({"type": "content", "content": [{"type": "image"}]}, "source.content[0].type"),
        (None, "source"),
    ],
)
async def test_documents_without_text_are_refused(source: Any, param: str) -> None:
    document = {"type": "document", "source": source}
    answer = await post(speaker("hermes", "x"), messages=[{"role": "user", "content": [document]}])
    assert answer.status_code == 400
    named, _, says = answer.json()["error"]["message"].partition(" ")
    assert named.rstrip(":") == f"messages[0].content[0].{param}" and says


async def test_tools_of_other_kinds_are_skipped_by_name() -> None:
    backend = speaker("hermes", "No.")
    answer = await post(backend, tools=[SEARCH, TOOL])
    assert answer.status_code == 200 and "tools[0]" in answer.headers["x-eyas-ignored"]


@pytest.mark.parametrize(
    ("choice", "is_forced"),
    [({"type": "auto"}, False), ({"type": "any"}, True), ({"type": "tool", "name": "weather"}, True)],
)
async def test_a_choice_of_tools(choice: dict[str, Any], is_forced: bool) -> None:
    backend = speaker("hermes", CALL)
    told = (await post(backend, tools=[TOOL], tool_choice=choice)).json()
    assert told["stop_reason"] == "tool_use" and told["content"][-1]["name"] == "weather"
    assert (backend.requests[-1].params.grammar is not None) == is_forced


async def test_its_clients_find_the_requests_id() -> None:
    """In the answer and in an error."""
    for changes, status in (({}, 200), ({"max_tokens": 0}, 400)):
        response = await post(speaker("hermes", "Good day."), **changes)
        assert response.status_code == status
        assert response.headers["request-id"] == response.headers["x-request-id"]


async def test_a_started_answer_goes_on() -> None:
    backend = speaker("hermes", " are blue.")
    await post(backend, messages=[*BODY["messages"], {"role": "assistant", "content": "Skies"}])
    assert prompt_of(backend).endswith("Skies")


async def test_why_an_answer_ends() -> None:
    backend = speaker("hermes", "one two three four")
    assert (await post(backend, max_tokens=2)).json()["stop_reason"] == "max_tokens"
    told = (await post(backend, stop_sequences=["three"])).json()
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "three")
    assert told["content"][0]["text"] == "one two "


async def test_a_limit_beyond_the_context_is_the_context() -> None:
    backend = speaker("hermes", "x")
    assert (await post(backend, max_tokens=10**6)).status_code == 200
    request = backend.requests[-1]
    assert request.params.max_tokens == (1 << 16) - len(request.prompt_ids)


@pytest.mark.parametrize("wrap", [lambda f: {"output_config": {"format": f}}, lambda f: {"output_format": f}])
async def test_an_answer_that_follows_a_schema(wrap: Callable[[Any], dict[str, Any]]) -> None:
    backend = speaker("hermes", "{}")
    await post(backend, **wrap({"type": "json_schema", "schema": {"type": "object"}}))
    grammar = backend.requests[-1].params.grammar
    assert grammar is not None and '"json_schema":{"type":"object"}' in grammar.text


async def test_tokens_are_counted_as_a_message_counts_them() -> None:
    backend = speaker("hermes", "x")
    body = {name: value for name, value in BODY.items() if name != "max_tokens"} | {"tools": [TOOL]}
    async with client_of(backend, GatewayConfig()) as client:
        counted = (await client.post("/v1/messages/count_tokens", json=body)).json()
        told = (await client.post("/v1/messages", json=BODY | {"tools": [TOOL]})).json()
    assert counted == {"input_tokens": told["usage"]["input_tokens"]}


@pytest.mark.parametrize(
    ("changes", "status", "kind", "says"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens is required"),
        ({"model": "other"}, 404, "not_found_error", "other"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].type",
        ),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences[0]"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error", "mcp_servers"),
        (
            {"tool_choice": {"type": "tool"}, "tools": [TOOL]},
            400,
            "invalid_request_error",
            "tool_choice.name",
        ),
        (
            {"tool_choice": {"type": "tool", "name": "none"}, "tools": [TOOL]},
            400,
            "invalid_request_error",
            "tool_choice",
        ),
    ],
)
async def test_errors_have_the_shape_of_the_api(
    changes: dict[str, Any], status: int, kind: str, says: str
) -> None:
    answer = await post(ScriptedBackend(nano_tokenizer()), **changes)
    told = answer.json()
    assert (answer.status_code, told["type"], told["error"]["type"]) == (status, "error", kind)
    assert says in told["error"]["message"] and told["request_id"] == answer.headers["request-id"]


async def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    backend = speaker("hermes", "one two")
    backend.breaks_with = Unavailable("the worker left")
    answer = await post(backend, stream=True)
    last = events_of(answer)[-1]
    assert last["error"] == {"type": "overloaded_error", "message": "the worker left"}
    assert last["request_id"] == answer.headers["request-id"]


async def test_the_sdk_of_anthropic() -> None:
    from anthropic import AsyncAnthropic, BadRequestError, NotFoundError  # takes seconds

    backend = speaker("hermes", f"Let me look.\n{CALL}")
    async with client_of(backend, GatewayConfig()) as http:
        client = AsyncAnthropic(api_key="any", base_url="http://server", http_client=http, max_retries=0)
        whole = await client.messages.create(**BODY, tools=[TOOL])  # type: ignore[call-overload]
        assert [block.type for block in whole.content] == ["text", "tool_use"]
        async with client.messages.stream(**BODY, tools=[TOOL]) as stream:  # type: ignore[arg-type]
            pieces = [piece async for piece in stream.text_stream]
            final = await stream.get_final_message()
        assert "".join(pieces) == whole.content[0].text
        assert final.content[1].input == {"city": "Köln"} and final.stop_reason == "tool_use"
        counted = await client.messages.count_tokens(model=MODEL, messages=BODY["messages"])
        assert counted.input_tokens > 3
        with pytest.raises(NotFoundError, match="other"):
            await client.messages.create(**BODY | {"model": "other"})
        with pytest.raises(BadRequestError, match="temperature"):
            await client.messages.create(**BODY, temperature=9)


async def test_reasoning_is_switched_on_by_thinking_alone() -> None:
    names = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    for dialect in ("hermes", "glm45"):
        reads = "enable_thinking" in tokenizer_of(dialect).template.reads  # type: ignore[union-attr]
        backend = speaker(dialect, "x")
        await post(backend)
        off = prompt_of(backend)
        await post(backend, **names)
        assert (prompt_of(backend) != off) == reads
