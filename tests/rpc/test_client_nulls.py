"""What is None is absent: in the SDK, and as null in HTTP, where OpenAI's clients write it for each field."""

from __future__ import annotations

from typing import Any, cast

import grpc
import pytest
from http_client import client_of
from tool_models import speaker

from eyas.client import ChatOptions, InvalidRequest, Message, Options, Tool
from eyas.client.wire import chat_request, generate_request
from protos import eyas_pb2, eyas_pb2_grpc
from tests.rpc.sdk_front import served
from tests.rpc.tool_requests import BODY, PATH

ASKED: Message = {"role": "user", "content": "Hi"}
FIELDS = ("content", "reasoning", "tool_calls", "tool_call_id")


def test_options_of_none_are_absent() -> None:
    nothing: Any = dict.fromkeys(ChatOptions.__optional_keys__)
    assert chat_request("m", [ASKED], nothing) == chat_request("m", [ASKED], {})
    assert chat_request("m", [ASKED], nothing | {"tools": [Tool("f")]}).tools[0].name == "f"
    nothing = dict.fromkeys(Options.__optional_keys__)
    assert generate_request("m", "x", nothing) == generate_request("m", "x", {})


def test_an_unknown_option_is_none_too() -> None:
    for make in (
        lambda more: chat_request("m", [ASKED], more),
        lambda more: generate_request("m", "x", more),
    ):
        with pytest.raises(InvalidRequest, match="size is not an option"):
            make(cast(Any, {"size": None}))


@pytest.mark.parametrize(
    "turn", [ASKED, {"role": "assistant", "content": "Hi"}, {"role": "system", "content": "x"}]
)
def test_fields_of_a_message_that_are_none_are_absent(turn: Any) -> None:
    assert chat_request("m", [dict.fromkeys(FIELDS) | turn], {}) == chat_request("m", [turn], {})  # type: ignore[list-item]


async def test_nulls_of_http_are_absent() -> None:
    backend = speaker("hermes", "Just words.", 1000)
    message = {"name": None, "tool_calls": None, "refusal": None, "audio": None, "function_call": None}
    function = {"strict": None, "description": None}
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    turns: list[dict[str, Any]] = [
        *BODY["messages"],
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "assistant", "content": "Rain."},
        ASKED,
    ]
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    written = [{"type": "function", "function": function | {"name": "get_weather", "parameters": None}}]
    body = {**BODY, "messages": turns, "tools": tools}
    nulls = dict.fromkeys(("tool_choice", "stop", "response_format", "n", "logprobs", "functions", "seed"))
    called = [call | {"index": None, "function": call["function"] | {"description": None}}]  # type: ignore[operator]
    full = [message | turn | ({"tool_calls": called} if "tool_calls" in turn else {}) for turn in turns]
    async with client_of(backend) as client:
        for asked in (
            body,
            body | nulls | {"messages": full, "tools": written},
            BODY,
            BODY | {"tools": None},
        ):
            response = await client.post(PATH, json=asked)
            assert response.status_code == 200, response.text
    plain, written_out, _, untold = backend.requests
    assert written_out.prompt_ids == plain.prompt_ids
    assert written_out.params.grammar == plain.params.grammar
    assert len(untold.prompt_ids) < len(backend.requests[2].prompt_ids)


async def test_nulls_of_grpc_are_absent() -> None:
    """The fields that hold JSON as text."""
    backend = speaker("hermes", "Just words.", 1000)
    message = eyas_pb2.ChatMessage(role=eyas_pb2.CHAT_ROLE_USER, content="Hi")
    async with served(backend) as address, grpc.aio.insecure_channel(address) as channel:
        chat = eyas_pb2_grpc.EyasStub(channel).Chat
        for tool, more in (
            (eyas_pb2.Tool(name="f"), {}),
            (eyas_pb2.Tool(name="f", parameters="null"), {"chat_template_kwargs": " null "}),
        ):
            request = eyas_pb2.ChatRequest(messages=[message], tools=[tool], **more)
            assert [event async for event in chat(request)]
    first, second = backend.requests
    assert first.prompt_ids == second.prompt_ids
