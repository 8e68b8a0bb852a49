"""Tools and reasoning through the public gRPC API and the SDK: the same as through HTTP."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from http_client import client_of
from scripted_backend import ScriptedBackend
from tool_models import WIDE, speaker, tokenizer_of

from eyas.client import AsyncClient, Choice, Client, InvalidRequest, Tool, ToolCall, Usage
from eyas.client.wire import chat_request
from protos import eyas_pb2, eyas_pb2_grpc
from tests.chat_templates import ASKED, TOOLS, called, result
from tests.rpc.sdk_front import served
from tests.rpc.tool_requests import BODY, PATH, SAYS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "grpc_tools.py"
OURS = [
    Tool(**{name: value for name, value in tool["function"].items() if name != "strict"}) for tool in TOOLS
]
REASONED = f"<think>\nIs it far?\n</think>\n\nLet me look.\n{SAYS['hermes']}"


async def ask(backend: ScriptedBackend, **more: Any) -> tuple[Choice, Usage]:
    """The choice of a whole answer, which is what the deltas of a streamed one make."""
    options = {"tools": OURS, "max_tokens": 400} | more
    async with served(backend) as address, AsyncClient(address, retries=0) as client:  # type: ignore[arg-type]
        whole = await client.chat([ASKED], **options)  # type: ignore[arg-type, list-item]
        async with client.chat_stream([ASKED], **options) as stream:  # type: ignore[arg-type, list-item]
            deltas = [delta async for delta in stream]
    (choice,) = whole.choices
    assert "".join(delta.text for delta in deltas) == choice.text
    assert "".join(delta.reasoning for delta in deltas) == choice.reasoning
    begun = [part for delta in deltas for part in delta.tool_calls if part.name]
    assert [part.index for part in begun] == [*range(len(choice.tool_calls))] and all(p.id for p in begun)
    assert stream.usage == whole.usage and deltas[-1].finish_reason == choice.finish_reason
    return choice, whole.usage


async def ask_http(backend: ScriptedBackend, **more: Any) -> dict[str, Any]:
    async with client_of(backend) as client:
        response = await client.post(PATH, json=BODY | more)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice | {"usage": response.json()["usage"]}


@pytest.mark.parametrize(
    ("dialect", "text"), [*SAYS.items(), ("hermes", REASONED), ("hermes", "Just words.\n")]
)
@pytest.mark.parametrize("stride", [2, pytest.param(1000, marks=pytest.mark.slow)])
async def test_an_answer_is_the_one_of_http(dialect: str, text: str, stride: int) -> None:
    backend = speaker(dialect, text, stride)
    theirs = await ask_http(backend)
    ours, usage = await ask(backend)
    message = theirs["message"]
    assert ours.text == (message["content"] or "")
    assert ours.reasoning == message.get("reasoning_content", "")
    assert [(call.name, call.arguments) for call in ours.tool_calls] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]
    assert [len(call.id) for call in ours.tool_calls] == [
        len(call["id"]) for call in message.get("tool_calls", ())
    ]
    assert ours.finish_reason == theirs["finish_reason"]
    assert usage.reasoning_tokens == theirs["usage"]["completion_tokens_details"]["reasoning_tokens"]
    first, *others = backend.requests
    assert all(other.prompt_ids == first.prompt_ids for other in others)
    assert all(other.params.grammar == first.params.grammar for other in others)


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("asked", "asked_http"),
    [
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        ({"tool_choice": "none"}, {"tool_choice": "none"}),
        ({"tool_choice": OURS[0]}, {"tool_choice": NAMED}),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"max_tokens": 12}, {"max_tokens": 12}),
        ({"stop": ["Köln"]}, {"stop": ["Köln"]}),
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "tools": []},
            {"chat_template_kwargs": {"enable_thinking": False}, "tools": []},
        ),
    ],
)
async def test_what_is_asked_means_the_same(asked: dict[str, Any], asked_http: dict[str, Any]) -> None:
    """Of the prompt, of the grammar, and of what is found in the answer."""
    backend = speaker("hermes", SAYS["hermes"], 1)
    theirs = await ask_http(backend, **asked_http)
    ours, _ = await ask(backend, **asked)
    assert len({request.prompt_ids for request in backend.requests}) == 1
    assert len({request.params.grammar for request in backend.requests}) == 1
    assert ours.finish_reason == theirs["finish_reason"]
    assert ours.text == (theirs["message"]["content"] or "")
    assert len(ours.tool_calls) == len(theirs["message"].get("tool_calls", ()))


async def test_a_history_means_the_same() -> None:
    backend = speaker("hermes", "Clear.")
    theirs = [ASKED, called('{"city": "Köln"}', content=None, reasoning_content="Hm"), result()]
    await ask_http(backend, messages=theirs)
    call = ToolCall("abc123XYZ", "weather", '{"city": "Köln"}')
    turn: dict[str, Any] = {"role": "assistant", "content": None, "reasoning": "Hm", "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": "abc123XYZ", "content": result()["content"]}
    async with served(backend) as address, AsyncClient(address, retries=0) as client:  # type: ignore[arg-type]
        await client.chat([ASKED, turn, answer], tools=OURS)  # type: ignore[list-item]
        bare = {name: value for name, value in turn.items() if name != "content"}
        await client.chat([ASKED, bare, answer], tools=OURS)  # type: ignore[list-item]
    assert len({request.prompt_ids for request in backend.requests}) == 1


def test_the_example_runs_as_written() -> None:
    """Its second question holds the call and its result. The page shows it as it is."""
    assert f"```python\n{EXAMPLE.read_text()}```" in (ROOT / "docs" / "tools.md").read_text()

    def says(request: Any, choice: int) -> str:
        asked = backend.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        if "<tool_response>" not in asked:
            return '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        assert '{"name": "weather", "arguments": {"city": "Oslo"}}' in asked
        return "Oslo has clear skies." if '"sky": "clear"' in asked else "Nothing came."

    backend = ScriptedBackend(tokenizer_of("hermes"), says, 2, infos=[WIDE])

    async def run() -> str:
        async with served(backend) as address:
            code = EXAMPLE.read_text().replace("127.0.0.1:8001", address)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
            )
            out, _ = await process.communicate()
            return out.decode()

    assert asyncio.run(run()) == "Oslo has clear skies.\n"


def test_the_blocking_client_is_the_same() -> None:
    backend = speaker("hermes", REASONED, 3)

    async def run() -> Choice:
        async with served(backend) as address:

            def ask() -> Choice:
                with Client(address, retries=0) as client:
                    return client.chat([ASKED], tools=OURS).choices[0]  # type: ignore[list-item]

            return await asyncio.to_thread(ask)

    choice = asyncio.run(run())
    assert choice.reasoning == "Is it far?" and len(choice.tool_calls) == 2
    assert choice.message["content"] == "Let me look." and choice.message["reasoning"] == "Is it far?"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": Tool("sing")}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [Tool("a b")]}, "tools[0].name"),
    ({"tools": ["weather"]}, "tools"),
    ({"tools": [Tool("a", parameters=[1])]}, "tools"),  # type: ignore[arg-type]
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"sing": 1}, "sing"),
]


@pytest.mark.parametrize(("more", "param"), REFUSED)
async def test_what_has_no_meaning_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await ask(speaker("hermes", "Hi"), **more)
    assert refused.value.param == param


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SHAPED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"content": [{"type": "text", "text": "Hi"}]}, {}, "messages[0].content must be text, not a list"),
    (
        {"role": "assistant", "tool_calls": [CALL]},
        {},
        "messages[0].tool_calls must be a list of eyas.client.ToolCall",
    ),
    ({}, {"tools": [{"type": "function", "function": {}}]}, "tools must be a list of eyas.client.Tool"),
]


@pytest.mark.parametrize(("message", "more", "reason"), SHAPED)
def test_shapes_of_openais_sdk_are_refused_by_what_belongs_there(
    message: dict[str, Any], more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(reason)):
        chat_request("m", [{"role": "user", "content": "Hi"} | message], more)  # type: ignore[list-item, arg-type]


SAID = [
    ({"role": 9}, "messages[0].role"),
    ({"role": eyas_pb2.CHAT_ROLE_TOOL, "content": "x"}, "messages[0].tool_call_id"),
    (
        {"role": eyas_pb2.CHAT_ROLE_USER, "tool_calls": [eyas_pb2.ToolCall(name="f")]},
        "messages[0].tool_calls",
    ),
]
TOLD = [
    ({"tools": [eyas_pb2.Tool(name="a", parameters="[1]")]}, "tools[0].parameters"),
    ({"tools": [eyas_pb2.Tool(name="a", parameters="{")]}, "tools[0].parameters"),
    ({"tools": [eyas_pb2.Tool()]}, "tools[0].name"),
    ({"tool_choice": eyas_pb2.ToolChoice(mode=9)}, "tool_choice.mode"),
    ({"chat_template_kwargs": "1"}, "chat_template_kwargs"),
    ({"chat_template_kwargs": '{"a": ["\\ud800"]}'}, "chat_template_kwargs"),
    ({"tools": [eyas_pb2.Tool(name="f", parameters='{"\\udc00": 1}')]}, "tools[0].parameters"),
]


@pytest.mark.parametrize(
    ("request_of", "param"),
    [
        *[({"messages": [eyas_pb2.ChatMessage(**fields)]}, param) for fields, param in SAID],
        *[
            (
                {"messages": [eyas_pb2.ChatMessage(role=eyas_pb2.CHAT_ROLE_USER, content="Hi")], **fields},
                param,
            )
            for fields, param in TOLD
        ],
    ],
)
async def test_callers_without_the_sdk_hear_the_field(request_of: dict[str, Any], param: str) -> None:
    async with served(speaker("hermes", "Hi")) as address, grpc.aio.insecure_channel(address) as channel:
        call = eyas_pb2_grpc.EyasStub(channel).Chat(eyas_pb2.ChatRequest(**request_of))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    told = {str(key): value for key, value in refused.value.trailing_metadata() or ()}
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and told["eyas-param"] == param
