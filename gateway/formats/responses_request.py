"""Reads the body of /v1/responses as a chat: items become messages, flat tools OpenAI's older objects.

A pure function.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from eyas.common.errors import InvalidRequest
from gateway.formats.fields import validated
from gateway.formats.responses_fields import (
    UNNAMED,
    FlatChoice,
    FlatName,
    ResponseItem,
    ResponsesBody,
    text_of,
)
from gateway.formats.schema import ChatBody, SamplingFields

_AS_THEY_ARE = (
    *(name for name in SamplingFields.model_fields if name != "no_stop_trim"),
    *("seed", "parallel_tool_calls", "chat_template_kwargs", "priority", "prompt_cache_key", "timeout"),
)
FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""The names of a chat's fields in this API."""


def as_chat(body: ResponsesBody) -> ChatBody:
    """The chat that the body asks for. Raises InvalidRequest for what cannot be one."""
    chat: dict[str, Any] = {
        name: value for name in _AS_THEY_ARE if (value := getattr(body, name)) is not None
    }
    chat |= {
        "model": body.model,
        "messages": _messages(body),
        "stream": body.stream,
        "max_tokens": body.max_output_tokens,
        "tools": [{"type": "function", "function": _function(tool)} for tool in body.tools or ()],
        "tool_choice": _choice(body.tool_choice),
        "response_format": _format(body),
        "logprobs": body.wants_logprobs,
        "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
    }
    try:
        read = validated(ChatBody, chat)
    except InvalidRequest as error:
        theirs = error.param or ""
        first = theirs.partition("[")[0].partition(".")[0]
        name = FIELDS.get(first, theirs)
        raise InvalidRequest(error.message.replace(theirs, name, 1), param=name) from None
    return read.model_copy(update={"speculative": body.speculative})


def _function(tool: Any) -> dict[str, Any]:
    fields = tool.model_dump(exclude_none=True)
    return {name: fields[name] for name in ("name", "description", "parameters", "strict") if name in fields}


def _choice(choice: Any) -> Any:
    if not isinstance(choice, FlatChoice):
        return choice
    if choice.type == "function":
        return _named(choice)
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools or ()]},
    }


def _named(tool: FlatName | FlatChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def _format(body: ResponsesBody) -> dict[str, Any] | None:
    format = body.text.format if body.text else None
    if format is None:
        return None
    if format.type != "json_schema":
        return {"type": format.type}
    return {
        "type": "json_schema",
        "json_schema": {"name": format.name or UNNAMED, "schema": format.definition},
    }


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    begin = [{"role": "system", "content": body.instructions}] if body.instructions else []
    said: str | Sequence[ResponseItem] = body.input
    if isinstance(said, str):
        return [*begin, {"role": "user", "content": said}]
    return [*begin, *_joined(said)]


def _joined(items: Iterable[ResponseItem]) -> list[dict[str, Any]]:
    """Messages of items. What an assistant thinks, says and calls in a row is one message."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's message that more may be part of
    for item in items:
        part = _assistant_part(item)
        if part is None:
            turn = None
            messages.append(_other(item))
        elif turn is None or not _follows(turn, part):
            turn = {"role": "assistant", **part}
            messages.append(turn)
        elif "tool_calls" in part and "tool_calls" in turn:
            turn["tool_calls"] += part["tool_calls"]
        else:
            turn |= part
    return messages


def _follows(turn: dict[str, Any], part: dict[str, Any]) -> bool:
    """Whether the part goes on with the message: reasoning, content and calls come in this order."""
    order = ("reasoning_content", "content", "tool_calls")
    latest = max(order.index(name) for name in turn if name in order)
    next_one = order.index(next(iter(part)))
    return next_one > latest or next_one == latest == 2


def _assistant_part(item: ResponseItem) -> dict[str, Any] | None:
    """Returns the item's part of an assistant's message; None if it belongs to another role."""
    if item.type == "reasoning":
        return {"reasoning_content": text_of(item.content) or text_of(item.summary)}
    if item.type == "function_call":
        function = {"name": item.name, "arguments": item.arguments or "{}"}
        return {"tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}
    if item.type == "message" and item.role == "assistant":
        return {"content": text_of(item.content)}
    return None


def _other(item: ResponseItem) -> dict[str, Any]:
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
    return {"role": item.role, "content": text_of(item.content)}
