"""OpenAI's other words for the same chat: allowed tools, refusals, efforts, and the older names of tools."""

from __future__ import annotations

import re
from typing import Any

import pytest
from http_client import client_of, events, refused
from tool_models import speaker

from eyas.common.types import GenerationRequest
from tests.chat_templates import ASKED, TOOLS
from tests.rpc.tool_requests import BODY, PATH, SAYS, allowed


def grammar_of(request: GenerationRequest) -> str | None:
    """The text of the request's grammar, without the names of the fields that its parts came from."""
    grammar = request.params.grammar
    return None if grammar is None else re.sub(r'(tools|functions)\[\d+\][^"]*', "", grammar.text)


async def test_allowed_tools_are_the_only_ones() -> None:
    """In the prompt and in the grammar; with `required` the answer is one of their calls."""
    backend = speaker("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    async with client_of(backend) as client:
        for more in (
            {"tool_choice": allowed("auto", "now")},
            {"tools": TOOLS[1:]},
            {"tool_choice": allowed("required", "now")},
            {"tools": TOOLS[1:], "tool_choice": "required"},
        ):
            response = await client.post(PATH, json=BODY | more)
            (choice,) = response.json()["choices"]
            assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"
            assert choice["finish_reason"] == "tool_calls"
    some, fewer, must, must_of_fewer = backend.requests
    assert some.prompt_ids == fewer.prompt_ids and must.prompt_ids == must_of_fewer.prompt_ids
    assert some.params.grammar is None is fewer.params.grammar
    assert grammar_of(must) == grammar_of(must_of_fewer) is not None


async def test_a_refusal_is_what_the_assistant_said() -> None:
    backend = speaker("hermes", "Why?")
    no: dict[str, Any] = {"role": "assistant", "content": "No."}
    spoken = [
        no,
        no | {"refusal": None},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    async with client_of(backend) as client:
        for message in spoken:
            response = await client.post(PATH, json=BODY | {"messages": [ASKED, message, ASKED]})
            assert response.status_code == 200, response.text
            assert "x-eyas-ignored" not in response.headers
    assert len({request.prompt_ids for request in backend.requests}) == 1


OLDER: dict[str, Any] = {"tools": None, "functions": [tool["function"] for tool in TOOLS]}


@pytest.mark.parametrize("stride", [1, 7, 1000])
async def test_the_older_words_for_tools(stride: int) -> None:
    """The prompt is that of tools, and the answer has one `function_call`, whole and streamed."""
    backend = speaker("hermes", f"Wait.{SAYS['hermes']}", stride)
    async with client_of(backend) as client:
        (choice,) = (await client.post(PATH, json=BODY | OLDER)).json()["choices"]
        call = {"name": "weather", "arguments": '{"city": "Köln"}'}
        assert choice["message"]["function_call"] == call and "tool_calls" not in choice["message"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Wait.", "function_call")
        chunks = events(await client.post(PATH, json=BODY | OLDER | {"stream": True}))
        await client.post(PATH, json=BODY)
    parts = [chunk["choices"][0] for chunk in chunks]
    told = [part["delta"]["function_call"] for part in parts if "function_call" in part["delta"]]
    assert "".join(part.get("name", "") for part in told) == call["name"]
    assert "".join(part["arguments"] for part in told) == call["arguments"]
    assert parts[-1]["finish_reason"] == "function_call"
    assert len({request.prompt_ids for request in backend.requests}) == 1


async def test_the_older_choice_and_history_mean_the_newer_ones() -> None:
    backend = speaker("hermes", SAYS["hermes"])
    call = {"name": "weather", "arguments": "{}"}
    older = [ASKED, {"role": "assistant", "content": None, "function_call": call}]
    older += [{"role": "function", "name": "weather", "content": "Rain."}]
    newer = [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_weather", "function": call}]},
    ]
    newer += [{"role": "tool", "tool_call_id": "call_weather", "name": "weather", "content": "Rain."}]
    named: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
    pairs = [
        ({"function_call": {"name": "now"}}, {"tool_choice": named}),
        ({"function_call": "none"}, {"tool_choice": "none"}),
        ({"messages": older}, {"messages": newer}),
    ]
    async with client_of(backend) as client:
        for ours, theirs in pairs:
            first = await client.post(PATH, json=BODY | OLDER | ours)
            second = await client.post(PATH, json=BODY | theirs | {"parallel_tool_calls": False})
            assert (first.status_code, second.status_code) == (200, 200), first.text
            assert "x-eyas-ignored" not in first.headers
            one, other = backend.requests[-2:]
            assert one.prompt_ids == other.prompt_ids and grammar_of(one) == grammar_of(other)


async def test_no_effort_is_no_reasoning() -> None:
    """Where the template has a switch; the usual effort asks for nothing."""
    backend = speaker("hermes", "Hi")
    async with client_of(backend) as client:
        for more in (
            {"reasoning_effort": "none"},
            {"enable_thinking": False},
            {"reasoning_effort": "medium"},
            {},
        ):
            assert (await client.post(PATH, json=BODY | more)).status_code == 200
    none, off, usual, plain = (request.prompt_ids for request in backend.requests)
    assert none == off != usual == plain
    async with client_of(speaker("deepseek_v3", "Hi")) as client:
        asked = BODY | {"reasoning_effort": "none"}
        assert "no switch" in refused(await client.post(PATH, json=asked), "reasoning_effort")
