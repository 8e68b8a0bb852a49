"""Half of a surrogate pair is no text: each field that takes text refuses it by name, over HTTP and gRPC."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from http_client import CHAT, GENERATE, TEXT, client_of, refused
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.client import AsyncClient, Tool, ToolCall
from eyas.common.errors import EyasError, InvalidRequest
from eyas.common.grammars.notations import Grammar
from eyas.common.wire import rpc
from eyas.common.wire.bad_text import MOST_FIELDS, bad_text
from protos import eyas_pb2
from tests.rpc.keyed_front import SOON_S, served

HALF = "ab\ud800"
ASKED = {"role": "user", "content": "Hi"}
FUNCTION = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
CALL = {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [HALF]}}}


def tool(**fields: Any) -> dict[str, Any]:
    return FUNCTION | {"function": FUNCTION["function"] | fields}  # type: ignore[operator]


def said(**fields: Any) -> list[dict[str, Any]]:
    return [ASKED, {"role": "assistant", "content": "x"} | fields, ASKED]


ITEMS = {"model": "eyas-nano", "input": "Hi"}
CLAUDE = {"model": "eyas-nano", "max_tokens": 4, "messages": [ASKED]}
BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", CHAT | fields, param)
    for fields, param in [
        ({"model": HALF}, "model"),
        ({"user": HALF}, "user"),
        ({"metadata": {"a": HALF}}, "metadata.a"),
        ({"metadata": {HALF: "a"}}, "metadata"),
        ({"stop": HALF}, "stop"),
        ({"stop": ["x", HALF]}, "stop[1]"),
        ({"bad_words": [HALF]}, "bad_words[0]"),
        ({"chat_template": HALF}, "chat_template"),
        ({"chat_template_kwargs": {"a": [{"b": HALF}]}}, "chat_template_kwargs.a[0].b"),
        ({"chat_template_kwargs": {HALF: 1}}, "chat_template_kwargs"),
        ({"reasoning_effort": HALF}, "reasoning_effort"),
        ({"documents": [{"text": HALF}]}, "documents[0].text"),
        ({"request_id": HALF}, "request_id"),
        ({"prompt_cache_key": HALF}, "prompt_cache_key"),
        ({"cache_salt": HALF}, "cache_salt"),
        ({"prediction": {"type": "content", "content": HALF}}, "prediction.content"),
        ({"messages": [{"role": HALF, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": HALF}]}, "messages[0].content"),
        ({"messages": [ASKED | {"name": HALF}]}, "messages[0].name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
            "messages[0].content[0].text",
        ),
        ({"messages": said(reasoning_content=HALF)}, "messages[1].reasoning_content"),
        ({"messages": said(tool_calls=[CALL | {"id": HALF}])}, "messages[1].tool_calls[0].id"),
        (
            {"messages": said(tool_calls=[CALL | {"function": {"name": HALF, "arguments": "{}"}}])},
            "messages[1].tool_calls[0].function.name",
        ),
        (
            {"messages": said(tool_calls=[CALL | {"function": {"name": "f", "arguments": {"a": HALF}}}])},
            "messages[1].tool_calls[0].function.arguments.a",
        ),
        (
            {"messages": [ASKED, {"role": "tool", "tool_call_id": HALF, "content": "x"}]},
            "messages[1].tool_call_id",
        ),
        ({"tools": [tool(name=HALF)]}, "tools[0].function.name"),
        ({"tools": [tool(description=HALF)]}, "tools[0].function.description"),
        ({"tools": [FUNCTION, tool(parameters={"title": HALF})]}, "tools[1].function.parameters.title"),
        ({"tools": [FUNCTION], "tool_choice": HALF}, "tool_choice"),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": HALF}}},
            "tool_choice.function.name",
        ),
        ({"response_format": SCHEMA}, "response_format.json_schema.schema.enum[0]"),
        ({"response_format": {"type": HALF}}, "response_format.type"),
        ({"guided_json": {"const": HALF}}, "guided_json.const"),
        ({"guided_regex": HALF}, "guided_regex"),
        ({"guided_choice": [HALF]}, "guided_choice[0]"),
        ({"guided_grammar": HALF}, "guided_grammar"),
        ({"structured_outputs": {"regex": HALF}}, "structured_outputs.regex"),
        ({"what nothing reads": HALF}, "what nothing reads"),
    ]
]
BODIES += [
    ("/v1/completions", TEXT | {"prompt": HALF}, "prompt"),
    ("/v1/completions", TEXT | {"prompt": ["a", HALF]}, "prompt[1]"),
    ("/v1/completions", TEXT | {"suffix": HALF}, "suffix"),
    ("/generate", GENERATE | {"text": HALF}, "text"),
    ("/generate", GENERATE | {"rid": HALF}, "rid"),
    ("/generate", GENERATE | {"sampling_params": {"stop": HALF}}, "sampling_params.stop"),
    (
        "/generate",
        GENERATE | {"sampling_params": {"json_schema": {"const": HALF}}},
        "sampling_params.json_schema.const",
    ),
    ("/tokenize", {"prompt": HALF}, "prompt"),
    ("/abort_request", {"rid": HALF}, "rid"),
    ("/v1/responses", ITEMS | {"input": HALF}, "input"),
    ("/v1/responses", ITEMS | {"instructions": HALF}, "instructions"),
    ("/v1/messages", CLAUDE | {"system": HALF}, "system"),
    ("/v1/messages", CLAUDE | {"metadata": {"user_id": HALF}}, "metadata.user_id"),
    (
        "/v1/messages/count_tokens",
        CLAUDE | {"messages": [{"role": "user", "content": HALF}]},
        "messages[0].content",
    ),
]
# JSON within a text, where a half is an escape.
TEXTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", CHAT | {"guided_json": r'{"const": "\ud800"}'}, "guided_json"),
    (
        "/v1/chat/completions",
        CHAT | {"structured_outputs": {"json": r'{"const": "\ud800"}'}},
        "structured_outputs.json",
    ),
    (
        "/generate",
        GENERATE | {"sampling_params": {"json_schema": r'{"const": "\udc00"}'}},
        "sampling_params.json_schema",
    ),
    (
        "/generate",
        GENERATE
        | {"sampling_params": {"structural_tag": r'{"format": {"type": "const_string", "value": "\ud800"}}'}},
        "sampling_params.structural_tag",
    ),
]


@pytest.mark.parametrize("written", ["as an escape", "as bytes"])
@pytest.mark.parametrize(
    ("path", "body", "param"), BODIES, ids=[f"{path} {param}" for path, _, param in BODIES]
)
async def test_over_http(path: str, body: dict[str, Any], param: str, written: str) -> None:
    raw = json.dumps(body).encode()
    if written == "as bytes":
        raw = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
    async with client_of(ScriptedBackend(nano_tokenizer())) as client:
        response = await client.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert "half of a surrogate pair" in error["message"] and param in error["message"]
    assert path.startswith("/v1/messages") or error["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"), TEXTS, ids=[f"{path} {param}" for path, _, param in TEXTS]
)
async def test_within_a_text_over_http(path: str, body: dict[str, Any], param: str) -> None:
    async with client_of(ScriptedBackend(nano_tokenizer())) as client:
        refused(await client.post(path, json=body), param)


async def test_in_a_path_and_a_header() -> None:
    async with client_of(ScriptedBackend(nano_tokenizer())) as client:
        assert (await client.get("/v1/models/a%ED%A0%80")).status_code == 404
        named = await client.get("/v1/models", headers={"x-request-id": b"\xed\xa0\x80"})  # type: ignore[dict-item]
        assert named.status_code == 200 and re.fullmatch("[!-~]+", named.headers["x-request-id"])


MARK, BAD = "MARKS", b"ab\xed\xa0\x80"
User = eyas_pb2.ChatMessage(role=eyas_pb2.CHAT_ROLE_USER, content="Hi")


def chat(**fields: Any) -> eyas_pb2.ChatRequest:
    return eyas_pb2.ChatRequest(**{"messages": [User], **fields})


def generate(**fields: Any) -> eyas_pb2.GenerateRequest:
    return eyas_pb2.GenerateRequest(text="Hi", options=eyas_pb2.GenerateOptions(**fields))


def turn(**fields: Any) -> eyas_pb2.ChatRequest:
    return chat(messages=[User, eyas_pb2.ChatMessage(role=eyas_pb2.CHAT_ROLE_ASSISTANT, **fields)])


MESSAGES: list[tuple[Any, str]] = [
    (chat(model=MARK), "model"),
    (chat(messages=[User, eyas_pb2.ChatMessage(role=1, content=MARK)]), "messages[1].content"),
    (turn(reasoning=MARK), "messages[1].reasoning"),
    (turn(tool_calls=[eyas_pb2.ToolCall(id="c", name=MARK)]), "messages[1].tool_calls[0].name"),
    (turn(tool_calls=[eyas_pb2.ToolCall(id="c", arguments=MARK)]), "messages[1].tool_calls[0].arguments"),
    (turn(tool_call_id=MARK), "messages[1].tool_call_id"),
    (chat(tools=[eyas_pb2.Tool(name="f"), eyas_pb2.Tool(name=MARK)]), "tools[1].name"),
    (chat(tools=[eyas_pb2.Tool(name="f", description=MARK)]), "tools[0].description"),
    (chat(tools=[eyas_pb2.Tool(name="f", parameters=MARK)]), "tools[0].parameters"),
    (chat(tool_choice=eyas_pb2.ToolChoice(name=MARK)), "tool_choice.name"),
    (chat(reasoning_effort=MARK), "reasoning_effort"),
    (chat(chat_template_kwargs=MARK), "chat_template_kwargs"),
    (eyas_pb2.GenerateRequest(model=MARK, text="Hi"), "model"),
    (eyas_pb2.GenerateRequest(text=MARK), "text"),
    (generate(stop=["a", MARK]), "options.stop[1]"),
    (generate(bad_words=[MARK]), "options.bad_words[0]"),
    (generate(prediction=MARK), "options.prediction"),
    (generate(grammar=eyas_pb2.Grammar(json_schema=MARK)), "options.grammar.json_schema"),
    (generate(grammar=eyas_pb2.Grammar(regex=MARK)), "options.grammar.regex"),
    (generate(grammar=eyas_pb2.Grammar(ebnf=MARK)), "options.grammar.ebnf"),
    (
        generate(grammar=eyas_pb2.Grammar(choice=eyas_pb2.Texts(texts=[MARK]))),
        "options.grammar.choice.texts[0]",
    ),
    (generate(grammar=eyas_pb2.Grammar(structural_tag=MARK)), "options.grammar.structural_tag"),
]
ESCAPED: list[tuple[Any, str]] = [
    (chat(chat_template_kwargs=r'{"a": "\ud800"}'), "chat_template_kwargs"),
    (chat(chat_template_kwargs=r'{"\udc00": 1}'), "chat_template_kwargs"),
    (chat(tools=[eyas_pb2.Tool(name="f", parameters=r'{"title": "\ud800"}')]), "tools[0].parameters"),
    (generate(grammar=eyas_pb2.Grammar(json_schema=r'{"const": "\ud800"}')), "grammar"),
    (
        generate(
            grammar=eyas_pb2.Grammar(
                structural_tag=r'{"format": {"type": "const_string", "value": "\ud800"}}'
            )
        ),
        "grammar",
    ),
]


async def error_of(channel: grpc.aio.Channel, message: Any, raw: bytes) -> EyasError:
    method = "Chat" if isinstance(message, eyas_pb2.ChatRequest) else "Generate"
    call = channel.unary_stream(f"/eyas.v1.Eyas/{method}")(
        raw, metadata=(("authorization", "Bearer open"),), timeout=SOON_S
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return rpc.map_rpc_error(caught.value)


async def test_over_grpc() -> None:
    """As bytes that are no UTF-8, and as escapes in texts that hold JSON."""
    async with served() as (channel, backend):
        for message, param in MESSAGES:
            raw = message.SerializeToString().replace(MARK.encode(), BAD)
            error = await error_of(channel, message, raw)
            assert (type(error), error.param) == (InvalidRequest, param), error
            assert "surrogate" in error.message and param in error.message
        for message, param in ESCAPED:
            error = await error_of(channel, message, message.SerializeToString())
            assert (type(error), error.param) == (InvalidRequest, param), error
        assert backend.requests == []


SENT: list[tuple[Callable[[AsyncClient], Any], str]] = [
    (lambda client: client.generate(HALF), "prompt"),
    (lambda client: client.generate("Hi", stop=[HALF]), "stop"),
    (lambda client: client.generate("Hi", prediction=HALF), "prediction"),
    (lambda client: client.generate("Hi", bad_words=HALF), "bad_words"),
    (lambda client: client.generate("Hi", grammar=Grammar.regex(HALF)), "grammar"),
    (
        lambda client: client.chat([{"role": "user", "content": "Hi"}, {"role": "user", "content": HALF}]),
        "messages[1]",
    ),
    (
        lambda client: client.chat([{"role": "assistant", "tool_calls": [ToolCall("c", HALF, "")]}]),
        "messages[0]",
    ),
    (lambda client: client.chat([ASKED], tools=[Tool(HALF)]), "tools"),
    (lambda client: client.chat([ASKED], tools=[Tool("f", parameters={"title": HALF})]), "tools"),
    (lambda client: client.chat([ASKED], tool_choice=Tool(HALF)), "tool_choice"),
    (lambda client: client.chat([ASKED], reasoning_effort=HALF), "reasoning_effort"),
    (lambda client: client.chat([ASKED], chat_template_kwargs={"a": HALF}), "chat_template_kwargs"),
]


async def test_in_the_sdk() -> None:
    async with (
        AsyncClient("127.0.0.1:1", retries=0) as client,
        AsyncClient("127.0.0.1:1", model=HALF) as other,
    ):
        for ask, param in SENT:
            with pytest.raises(InvalidRequest, match="holds half of a surrogate pair") as caught:
                await ask(client)
            assert caught.value.param == param and str(caught.value).startswith(param)
        for call in (lambda: other.generate("Hi"), lambda: other.chat([ASKED])):
            with pytest.raises(InvalidRequest, match="model holds half of a surrogate pair"):
                await call()


def test_only_a_text_that_is_none_is_named() -> None:
    kind = eyas_pb2.GenerateRequest.DESCRIPTOR
    good = eyas_pb2.GenerateRequest(
        text="häl😀", options=generate(stop=["a"], logit_bias={3: 1.5}, seed=7).options
    )
    assert bad_text(kind, good.SerializeToString()) is None
    for end in range(len(good.SerializeToString())):
        bad_text(kind, good.SerializeToString()[:end])
    unknown = b"\x7a\x02\xed\xa0"  # field 15, of a newer version perhaps
    assert bad_text(kind, unknown) is None and bad_text(kind, unknown + b"\x12\x01\xff") == "text"
    assert bad_text(kind, b"\x08\x01" * MOST_FIELDS + b"\x12\x01\xff") is None
    assert bad_text(kind, b"\x0b" * 9) is None and bad_text(kind, b"\xff" * 20) is None
