"""Moves the results of calls into the message with the calls, where a template reads them there (Gemma 4's
`tool_responses`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from gateway.text.dialect import THOUGHTS, TemplateDialect
from gateway.text.templates import Message


def with_responses(messages: Sequence[Message], dialect: TemplateDialect) -> list[Message]:
    """The chat with each result in the message of its call. Words of that message go before it, as a message
    of their own: they would end the turn behind the results; and before them its reasoning, which came first,
    where there is room for it. Results of no call stay as they are.
    """
    made: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        names = {call.get("id"): call["function"]["name"] for call in message.get("tool_calls") or ()}
        responses = [
            {"name": names[result.get("tool_call_id")], "response": _response(result["content"])}
            for result in _results_of(names, messages[at:])
        ]
        at += len(responses)
        if responses:
            if message.get("content"):
                words, message = _apart(message, dialect)
                made.append(words)
            message = {**dialect.silent(message), "tool_responses": responses}
        made.append(message)
    return made


def _apart(message: Message, dialect: TemplateDialect) -> tuple[Message, Message]:
    """The words of a message, and the rest."""
    moved = {"content", *(THOUGHTS if dialect.words_think else ())}
    words = {key: value for key, value in message.items() if key in moved}
    return {"role": dialect.words_role, **words}, {
        key: value for key, value in message.items() if key not in moved
    }


def _results_of(calls: Container[Any], messages: Sequence[Message]) -> Iterator[Message]:
    return itertools.takewhile(lambda m: m["role"] == "tool" and m.get("tool_call_id") in calls, messages)


def _response(content: Any) -> Any:
    """An object, or text, as one stays that holds half of a surrogate pair."""
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    try:
        read = json.loads(text)
        json.dumps(read, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    return read if isinstance(read, Mapping) else text
