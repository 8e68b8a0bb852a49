"""The protobuf messages of chats alone: turns, tools, and which of them are called."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from eyas.client.types import ChatOptions, Message, Options, Tool
from eyas.client.wire import request_to_pb, unsendable
from eyas.common.errors import InvalidRequest
from protos import eyas_pb2

_ROLES = {
    "system": eyas_pb2.CHAT_ROLE_SYSTEM,
    "user": eyas_pb2.CHAT_ROLE_USER,
    "assistant": eyas_pb2.CHAT_ROLE_ASSISTANT,
    "tool": eyas_pb2.CHAT_ROLE_TOOL,
}
_MODES = {
    "auto": eyas_pb2.TOOL_MODE_AUTO,
    "none": eyas_pb2.TOOL_MODE_NONE,
    "required": eyas_pb2.TOOL_MODE_REQUIRED,
}
_OWN = ChatOptions.__optional_keys__ - Options.__optional_keys__


def chat_request(model: str, messages: Sequence[Message], options: ChatOptions) -> eyas_pb2.ChatRequest:
    """Raises InvalidRequest naming a value that cannot be sent."""
    common = {name: value for name, value in options.items() if name not in _OWN}
    request = request_to_pb(eyas_pb2.ChatRequest, model, cast(Options, common))
    try:
        request.messages.extend(_message_to_pb(i, message) for i, message in enumerate(messages))
    except (AttributeError, TypeError, ValueError) as error:
        name = f"messages[{len(request.messages)}]" if isinstance(error, UnicodeEncodeError) else "messages"
        raise unsendable(name, "messages must be a list of role and content", error) from error
    for name in options.keys() & _OWN:
        value: Any = options[name]  # type: ignore[literal-required]
        if value is None:
            continue
        try:
            request.MergeFrom(eyas_pb2.ChatRequest(**{name: _own_to_pb(name, value)}))
        except (AttributeError, TypeError, ValueError) as error:
            raise unsendable(name, f"{name} cannot be {value!r:.200}", error) from error
    return request


def _message_to_pb(i: int, message: Message) -> eyas_pb2.ChatMessage:
    role = message.get("role")
    if role not in _ROLES:
        field = f"messages[{i}].role"
        raise InvalidRequest(f"{field} must be one of {', '.join(_ROLES)}, not {role!r:.40}", param=field)
    if role != "assistant" and message.get("content") is None:
        field = f"messages[{i}].content"
        raise InvalidRequest(f"{field} is required", param=field)
    calls = [
        eyas_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
        for call in message.get("tool_calls") or ()
    ]
    return eyas_pb2.ChatMessage(
        role=_ROLES[role],
        content=message.get("content"),
        reasoning=message.get("reasoning"),
        tool_calls=calls,
        tool_call_id=message.get("tool_call_id"),
    )


def _own_to_pb(name: str, value: Any) -> Any:
    match name:
        case "tools":
            return [_tool_to_pb(tool) for tool in value]
        case "tool_choice":
            return _choice_to_pb(value)
        case "chat_template_kwargs":
            return _text_of(value)
    return value


def _tool_to_pb(tool: Tool) -> eyas_pb2.Tool:
    parameters = None if tool.parameters is None else _text_of(tool.parameters)
    return eyas_pb2.Tool(
        name=tool.name, description=tool.description, parameters=parameters, strict=tool.strict
    )


def _choice_to_pb(choice: str | Tool) -> eyas_pb2.ToolChoice:
    if isinstance(choice, Tool):
        return eyas_pb2.ToolChoice(name=choice.name)
    if choice not in _MODES:
        raise ValueError(f"it must be one of {', '.join(_MODES)}, or a tool")
    return eyas_pb2.ToolChoice(mode=_MODES[choice])


def _text_of(value: Mapping[str, Any]) -> str:
    """The JSON text of an object."""
    return json.dumps(dict(value), ensure_ascii=False)
