"""Chats of `eyas.v1.Eyas`: messages and tools as the HTTP front has them, and answers that are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from eyas.common.errors import InvalidRequest
from gateway.formats.chat_fields import ChatMessage
from gateway.formats.fields import validated
from gateway.formats.schema import TemplateFields
from gateway.grpc.messages import delta_to_pb
from gateway.parsers.events import CallArguments, CallStarted, ContentText, Event, ReasoningText
from gateway.text.entries import TextDelta
from gateway.text.message_reader import CALLS, MessageReader
from protos import eyas_pb2

_ROLES = {
    eyas_pb2.CHAT_ROLE_SYSTEM: "system",
    eyas_pb2.CHAT_ROLE_USER: "user",
    eyas_pb2.CHAT_ROLE_ASSISTANT: "assistant",
    eyas_pb2.CHAT_ROLE_TOOL: "tool",
}
_MODES = {
    eyas_pb2.TOOL_MODE_UNSPECIFIED: "auto",
    eyas_pb2.TOOL_MODE_AUTO: "auto",
    eyas_pb2.TOOL_MODE_NONE: "none",
    eyas_pb2.TOOL_MODE_REQUIRED: "required",
}


class GrpcChat(TemplateFields):
    """A chat with its tools."""

    messages: list[ChatMessage] = Field(min_length=1)


def chat_of(request: eyas_pb2.ChatRequest) -> GrpcChat:
    """The chat that is asked for. Raises InvalidRequest naming the first field that is wrong."""
    if not request.messages:
        raise InvalidRequest("messages is empty", param="messages")
    fields: dict[str, Any] = {
        "messages": [_message(i, message) for i, message in enumerate(request.messages)],
        "tools": [_tool(i, tool) for i, tool in enumerate(request.tools)] or None,
        "tool_choice": _choice(request.tool_choice),
        "chat_template_kwargs": _object(request, "chat_template_kwargs"),
    }
    names = ("parallel_tool_calls", "enable_thinking", "reasoning_effort")
    fields |= {name: getattr(request, name) for name in names if request.HasField(name)}
    try:
        return validated(GrpcChat, fields)
    except InvalidRequest as error:  # here a function's fields are the tool's, and the call's
        param = (error.param or "").replace(".function", "")
        raise InvalidRequest(error.message.replace(".function", ""), param=param or None) from None


def read_delta_to_pb(delta: TextDelta, reader: MessageReader) -> eyas_pb2.Delta:
    """Converts one delta of a parsed choice: reasoning, then content, then calls."""
    events = reader.read(delta)
    message = delta_to_pb(delta)
    message.text = "".join(event.text for event in events if isinstance(event, ContentText))
    message.reasoning = "".join(event.text for event in events if isinstance(event, ReasoningText))
    message.tool_calls.extend(_calls_to_pb(events, reader))
    if reader.finish_reason(delta.finish) == CALLS:
        message.finish_reason = eyas_pb2.FINISH_REASON_TOOL_CALLS
    return message


def _calls_to_pb(events: Sequence[Event], reader: MessageReader) -> list[eyas_pb2.ToolCallDelta]:
    calls: dict[int, eyas_pb2.ToolCallDelta] = {}
    for event in events:
        if isinstance(event, CallStarted):
            id = reader.call_ids[event.index]
            calls[event.index] = eyas_pb2.ToolCallDelta(index=event.index, id=id, name=event.name)
        elif isinstance(event, CallArguments):
            call = calls.setdefault(event.index, eyas_pb2.ToolCallDelta(index=event.index))
            call.arguments += event.text
    return list(calls.values())


def _message(i: int, message: eyas_pb2.ChatMessage) -> dict[str, Any]:
    if message.role not in _ROLES:
        field, names = f"messages[{i}].role", ", ".join(map(eyas_pb2.ChatRole.Name, _ROLES))
        raise InvalidRequest(f"{field} must be one of {names}", param=field)
    read: dict[str, Any] = {"role": _ROLES[message.role]}
    if message.HasField("content") or message.role != eyas_pb2.CHAT_ROLE_ASSISTANT:
        read["content"] = message.content
    if message.HasField("reasoning"):
        read["reasoning"] = message.reasoning
    if message.HasField("tool_call_id"):
        read["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        read["tool_calls"] = [
            {"id": call.id or None, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return read


def _tool(i: int, tool: eyas_pb2.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.HasField("description"):
        function["description"] = tool.description
    if tool.HasField("parameters"):
        function["parameters"] = _object(tool, "parameters", f"tools[{i}].")
    if tool.HasField("strict"):
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: eyas_pb2.ToolChoice) -> Any:
    if choice.WhichOneof("choice") == "name":
        return {"type": "function", "function": {"name": choice.name}}
    if choice.mode not in _MODES:
        names = ", ".join(map(eyas_pb2.ToolMode.Name, _MODES))
        raise InvalidRequest(f"tool_choice.mode must be one of {names}", param="tool_choice.mode")
    return _MODES[choice.mode]


def _object(message: Any, name: str, path: str = "") -> dict[str, Any] | None:
    """The JSON object that a field holds as text; None if the field is absent, or null."""
    if not message.HasField(name) or getattr(message, name).strip() == "null":
        return None
    try:
        read = json.loads(getattr(message, name))
        json.dumps(read, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except UnicodeEncodeError:
        what = f"{path}{name} holds half of a surrogate pair, which is no text"
        raise InvalidRequest(what, param=path + name) from None
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise InvalidRequest(f"{path}{name} must be the text of a JSON object", param=path + name)
    return read
