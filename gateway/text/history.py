"""Messages of a chat for the model's template: calls, their results, reasoning, parts of content."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.formats.chat_fields import ChatMessage, ChatToolCall
from gateway.parsers.table import CallIds, counted_id
from gateway.text.dialect import ABSENT, TemplateDialect
from gateway.text.templates import Message

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


def template_messages(messages: Sequence[ChatMessage], dialect: TemplateDialect) -> list[Message]:
    """The chat as this dialect's template reads it. Keys without a value are left out."""
    ids = _ChatCallIds(dialect)
    return [_message(message, dialect, ids) for message in messages]


def calls_in(messages: Sequence[ChatMessage]) -> int:
    """How many calls the chat has."""
    return sum(len(message.tool_calls or ()) for message in messages)


def _message(message: ChatMessage, dialect: TemplateDialect, ids: _ChatCallIds) -> Message:
    read: dict[str, Any] = {"role": message.role}
    content = _content(message, dialect)
    if content is not ABSENT:
        read["content"] = content
    if message.name is not None:
        read["name"] = message.name
    if (thought := message.reasoning) is not None:
        read |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thought)
    if message.tool_calls:
        read["tool_calls"] = [_call(call, dialect, ids) for call in message.tool_calls]
    if message.tool_call_id is not None:
        read["tool_call_id"] = ids.of_result(message.tool_call_id)
    return read


def _content(message: ChatMessage, dialect: TemplateDialect) -> Any:
    """Text; parts where the template goes through them; what it wants for none."""
    content: str | list[Any] | None = message.content
    if content is None:
        return dialect.no_content if message.tool_calls else ""
    if isinstance(content, str):
        return content
    if dialect.lists_parts:
        return [{"type": part.type, "text": part.text} for part in content]
    return "\n".join(part.text for part in content)


def texts_of(message: ChatMessage) -> list[str]:
    """The texts of a message's content."""
    content: str | list[Any] | None = message.content
    return [content] if isinstance(content, str) else [part.text for part in content or ()]


def _call(call: ChatToolCall, dialect: TemplateDialect, ids: _ChatCallIds) -> Mapping[str, Any]:
    arguments = call.function.arguments
    if dialect.text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not dialect.text_arguments and isinstance(arguments, str):
        arguments = _object(arguments)
        if dialect.object_arguments and not isinstance(arguments, dict):
            arguments = {"arguments": arguments}
    function = {"name": call.function.name, "arguments": arguments}
    written = {"type": "function", "function": function}
    id = ids.of_call(call)
    return written if id is None else {"id": id, **written}


def _object(arguments: str) -> Any:
    """The object of this text, which stays text if it is none, or holds half of a surrogate pair: a model's
    mistakes are part of its history.
    """
    try:
        read = json.loads(arguments) if arguments.strip() else {}
        json.dumps(read, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


class _ChatCallIds:
    """The ids of a chat's calls as the template wants them, in the order in which messages have them."""

    def __init__(self, dialect: TemplateDialect) -> None:
        self._kind = CallIds.FREE if dialect.calls is None else dialect.calls.ids
        self._counted: dict[str, str] = {}  # by the caller's ids
        self._count = 0

    def of_call(self, call: ChatToolCall) -> str | None:
        """Returns the id of a call; one without an id gets one only where calls are counted."""
        if self._kind is CallIds.COUNTED:
            id = counted_id(call.function.name, self._count)
            self._count += 1
            if call.id is not None:
                self._counted[call.id] = id
            return id
        return None if call.id is None else self._short(call.id)

    def of_result(self, id: str) -> str:
        """Returns the id of the call whose result a message is."""
        return self._counted.get(id, id) if self._kind is CallIds.COUNTED else self._short(id)

    def _short(self, id: str) -> str:
        """The id; for templates that want nine characters, nine made of any other."""
        if self._kind is not CallIds.SHORT or _SHORT_ID.fullmatch(id):
            return id
        return hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:9]
