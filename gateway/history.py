"""Messages of a chat as the model's template wants them: calls, their results, reasoning, parts of content.

It knows what a `Dialect` says of the template. It refuses to know what the template makes of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.chat import Message
from gateway.chat_fields import ChatMessage, ToolCall
from gateway.dialect import ABSENT, Dialect

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


def template_messages(messages: Sequence[ChatMessage], dialect: Dialect) -> list[Message]:
    """The chat as this dialect's template reads it. Keys without a value are left out."""
    return [_message(message, dialect) for message in messages]


def _message(message: ChatMessage, dialect: Dialect) -> Message:
    read: dict[str, Any] = {"role": message.role}
    content = _content(message, dialect)
    if content is not ABSENT:
        read["content"] = content
    if message.name is not None:
        read["name"] = message.name
    if (thought := message.reasoning) is not None:
        read |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thought)
    if message.tool_calls:
        read["tool_calls"] = [_call(call, dialect) for call in message.tool_calls]
    if message.tool_call_id is not None:
        read["tool_call_id"] = _id(message.tool_call_id, dialect)
    return read


def _content(message: ChatMessage, dialect: Dialect) -> Any:
    """Text; parts where the template goes through them; what it wants for none."""
    content: str | list[Any] | None = message.content
    if content is None:
        return dialect.no_content if message.tool_calls else ""
    if isinstance(content, str):
        return content
    if dialect.lists_parts:
        return [{"type": part.type, "text": part.text} for part in content]
    return "\n".join(part.text for part in content)


def _call(call: ToolCall, dialect: Dialect) -> Mapping[str, Any]:
    arguments = call.function.arguments
    if dialect.text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not dialect.text_arguments and isinstance(arguments, str):
        arguments = _object(arguments)
    function = {"name": call.function.name, "arguments": arguments}
    told = {"type": "function", "function": function}
    return told if call.id is None else {"id": _id(call.id, dialect), **told}


def _object(arguments: str) -> Any:
    """The object of this text, which stays text if it is none: a model's mistakes are part of its history."""
    try:
        read = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _id(id: str, dialect: Dialect) -> str:
    """The id of a call; for templates that want nine characters, nine made of any other."""
    if dialect.calls is None or not dialect.calls.short_ids or _SHORT_ID.fullmatch(id):
        return id
    return hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:9]
