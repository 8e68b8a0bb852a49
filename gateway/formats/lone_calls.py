"""Splits messages for templates that have room for one call per message (gpt-oss, Llama 3), or for reasoning
or words before a call, but not for both (gpt-oss).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from gateway.text.dialect import THOUGHTS, TemplateDialect
from gateway.text.templates import Message


def with_room(messages: Sequence[Message], dialect: TemplateDialect) -> list[Message]:
    """The chat as the template has room for it; nothing of it is lost."""
    if dialect.lone_words:
        messages = [_joined(message, dialect) for message in messages]
    return _apart(messages, dialect) if dialect.lone_calls else list(messages)


def _joined(message: Message, dialect: TemplateDialect) -> Message:
    """A message with calls, its words behind its reasoning."""
    thought, words = message.get(THOUGHTS[0]), message.get("content")
    if not (message.get("tool_calls") and thought and isinstance(words, str) and words):
        return message
    return {**dialect.silent(message), **dict.fromkeys(THOUGHTS, f"{thought}\n\n{words}")}


def _apart(messages: Sequence[Message], dialect: TemplateDialect) -> list[Message]:
    """A message for each call, with the results of that call behind it; those of no call come last."""
    made: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            made.append(message)
            continue
        results = list(itertools.takewhile(lambda later: later["role"] == "tool", messages[at:]))
        at += len(results)
        for number, call in enumerate(calls):
            beside = message if number == 0 else dialect.silent({"role": message["role"]})
            made.append({**beside, "tool_calls": [call]})
            own = [result for result in results if result.get("tool_call_id") == call.get("id")]
            results = [result for result in results if result not in own]
            made += own
        made += results
    return made
