"""What coding agents send, in the shapes that Claude Code and Codex have: answered, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_client import client_of
from tool_models import speaker

from gateway.formats.fields import parse
from gateway.formats.responses_request import ResponsesBody, as_chat

THOUGHT = "<think>\nI look.\n</think>\n\nDone."
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"line": {"type": "string"}},
    "required": ["line"],
    "additionalProperties": False,
}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
RUN = {"name": "Run", "description": "Runs a line.", "input_schema": SCHEMA}
CALLED = {
    "role": "assistant",
    "content": [
        {"type": "thinking", "thinking": "hm", "signature": "abc"},
        {"type": "redacted_thinking", "data": "abc"},
        {"type": "text", "text": "I run it.", "citations": None},
        {
            "type": "tool_use",
            "id": "toolu_1",
            "name": "Run",
            "input": {"line": "ls"},
            "caller": {"type": "direct"},
        },
    ],
}
ASK = {
    "role": "user",
    "content": [{"type": "text", "text": "Note."}, {"type": "text", "text": "Do.", **CACHED}],
}
MESSAGES: dict[str, Any] = {
    "model": "eyas-nano",
    "max_tokens": 32000,
    "stream": True,
    "system": [{"type": "text", "text": "You act."}, {"type": "text", "text": "Here.", **CACHED}],
    "metadata": {"user_id": "user_1__session_1"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "temperature": 1,
    "tools": [RUN, RUN | {"name": "mcp__a__b", "eager_input_streaming": True, "defer_loading": False}],
    "messages": [ASK],
}
BETA = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14,x-2030"}


def returned(content: Any = None, **more: Any) -> dict[str, Any]:
    """The messages up to the result of a call."""
    block = {"type": "tool_result", "tool_use_id": "toolu_1", **CACHED, **more}
    given = block if content is None else block | {"content": content}
    return {"messages": [ASK, CALLED, {"role": "user", "content": [given]}]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
NAMED = {"type": "tool", "name": "Run", "disable_parallel_tool_use": True}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ({}, ""),
        (returned("out"), ""),
        (returned([{"type": "text", "text": "out"}], is_error=True), ""),
        (returned(), ""),
        (returned([]), ""),
        (returned([IMAGE]), "messages[2].content[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [ASK, {"role": "assistant", "content": "{"}]}, ""),
        ({"messages": [ASK, {"role": "system", "content": "Now."}, ASK]}, ""),
        ({"thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "high"}}, ""),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, ""),
        ({"tool_choice": {"type": "any"}}, ""),
        ({"tool_choice": NAMED}, ""),
        ({"tools": [SEARCH, RUN]}, ""),
        ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, ""),
        ({"mcp_servers": [{"type": "url", "url": "https://a", "name": "a"}]}, "mcp_servers"),
    ],
)
async def test_messages(more: dict[str, Any], refused: str) -> None:
    body = MESSAGES | more
    counted = {name: body[name] for name in body.keys() - {"max_tokens", "stream", "temperature", "metadata"}}
    async with client_of(speaker("hermes", THOUGHT)) as client:
        for path, given in (("", body), ("/count_tokens", counted)):
            answer = await client.post(f"/v1/messages{path}?beta=true", json=given, headers=BETA)
            assert answer.status_code == (400 if refused else 200), answer.text
            if refused:
                assert refused in answer.json()["error"]["message"]
            elif path:
                assert answer.json()["input_tokens"] > 10
            else:
                assert answer.text.rstrip().endswith('data: {"type":"message_stop"}')


FUNCTION = {"type": "function", "name": "shell", "strict": False, "parameters": SCHEMA}
OTHERS = [
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": False},
    {
        "type": "custom",
        "name": "patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
    },
    {"type": "namespace", "name": "mcp", "tools": [FUNCTION]},
]


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


RESPONSES: dict[str, Any] = {
    "model": "eyas-nano",
    "instructions": "You act.",
    "input": [said("developer", "Rules."), said("user", "Where."), said("user", "Do.")],
    "tools": [FUNCTION, *OTHERS],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "client_metadata": {"a": "b"},
}
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "name": "shell",
    "arguments": '{"line": "ls"}',
    "call_id": "c1",
}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "out"}
SEALED = {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAA"}
SUMMED = SEALED | {"summary": [{"type": "summary_text", "text": "I look."}]}
TOLD = {
    "type": "message",
    "role": "assistant",
    "phase": "commentary",
    "content": [{"type": "output_text", "text": "I run it.", "annotations": [], "logprobs": []}],
}
PATCH = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "x", "status": "completed"}
PATCHED = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
PICTURE = [{"type": "input_image", "image_url": "data:x"}]


def after(*items: dict[str, Any]) -> dict[str, Any]:
    return {"input": [*RESPONSES["input"], *items]}


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ({}, ""),
        (after(SEALED, CALL, OUTPUT), ""),
        (after(SUMMED, TOLD, CALL, CALL | {"call_id": "c2"}, OUTPUT, OUTPUT | {"call_id": "c2"}), ""),
        (after(CALL, OUTPUT | {"output": [{"type": "input_text", "text": "out"}]}), ""),
        (after(CALL, OUTPUT | {"output": PICTURE}), "input[4].output[0].type"),
        (after(PATCH, PATCHED), ""),
        (after({**PATCH, "input": None}), "input[3].input"),
        (after({"type": "local_shell_call", "call_id": "c1", "action": {"type": "exec"}}), "input[3].type"),
        (after({"type": "item_reference", "id": "rs_1"}), "input[3].type"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ""),
        ({"tool_choice": {"type": "custom", "name": "patch"}}, "tool_choice.type"),
        ({"text": {"verbosity": "medium"}, "top_logprobs": 0, "service_tier": "auto"}, ""),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
async def test_responses(more: dict[str, Any], refused: str) -> None:
    async with client_of(speaker("hermes", THOUGHT)) as client:
        answer = await client.post("/v1/responses", json=RESPONSES | more)
    assert answer.status_code == (400 if refused else 200), answer.text
    if refused:
        assert answer.json()["error"]["param"] == refused
        return
    assert "response.completed" in answer.text.rstrip().rpartition("\n")[2]
    for i, tool in enumerate(OTHERS, 1):
        assert f"tools[{i}]:{tool['type']}" in answer.headers["x-eyas-ignored"]


def test_a_call_of_a_custom_tool_is_read_as_one_with_its_input() -> None:
    body = parse(ResponsesBody, json.dumps(RESPONSES | after(PATCH, PATCHED)).encode())
    call, result = as_chat(body).messages[-2:]
    assert call.tool_calls and call.tool_calls[0].function.name == "patch"
    assert call.tool_calls[0].function.arguments == {"input": "x"}
    assert (result.role, result.tool_call_id) == ("tool", "c1")
    assert str(result.content) == "done"
