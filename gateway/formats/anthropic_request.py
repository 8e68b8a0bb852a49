"""Reads the body of /v1/messages as a chat: blocks become messages, calls and results OpenAI's.

A pure function.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from eyas.common.errors import InvalidRequest
from gateway.formats.anthropic_fields import ChatTurn, ContentBlock, CountBody, MessagesBody, Texts
from gateway.formats.fields import validated
from gateway.formats.schema import ChatBody

FIELDS = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config",
}
"""The names of a chat's fields in this API."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SWITCHES = ("enable_thinking", "thinking")


def as_chat(body: CountBody, reads: Collection[str]) -> ChatBody:
    """The chat that the body asks for. `reads`: the variables that the model's template reads.

    Raises InvalidRequest for what cannot be a chat.
    """
    messages = [*_system(body.system), *_merged(body.messages)]
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "tools": [_function(tool) for tool in body.tools or () if tool.is_own],
        "continue_final_message": _is_prefill(messages[-1]),
        **_choice(body),
        **_thinking(body, reads),
    }
    if isinstance(body, MessagesBody):
        options = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        chat |= {name: value for name in options if (value := getattr(body, name)) is not None}
        chat["stop"] = body.stop_sequences
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "answer", "schema": body.output_config.format.definition}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    try:
        return validated(ChatBody, chat)
    except InvalidRequest as error:
        theirs = error.param or ""
        ours = FIELDS.get(theirs.partition("[")[0].partition(".")[0], theirs)
        ours = ours.replace(".function.parameters", ".input_schema").replace(".function.", ".")
        raise InvalidRequest(error.message.replace(theirs, ours, 1), param=ours) from None


def skipped_tools(body: CountBody) -> list[str]:
    """The tools that are not the caller's own functions, as `x-eyas-ignored` names them."""
    return [f"tools[{i}]" for i, tool in enumerate(body.tools or ()) if not tool.is_own]


def _system(system: Texts | None) -> list[dict[str, Any]]:
    text = _text(system)
    return [{"role": "system", "content": text}] if text else []


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


def _merged(turns: list[ChatTurn]) -> list[dict[str, Any]]:
    """Messages of turns. Texts of one role in a row are one message: templates want roles to alternate."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        for message in _messages(turn):
            last = messages[-1] if messages else None
            if last is not None and last["role"] == message["role"] and _is_text(last) and _is_text(message):
                last["content"] += f"\n{message['content']}"
            else:
                messages.append(message)
    return messages


def _is_text(message: dict[str, Any]) -> bool:
    return message.keys() == {"role", "content"}


def _messages(turn: ChatTurn) -> Iterator[dict[str, Any]]:
    content: Any = turn.content
    if isinstance(content, str):
        yield {"role": turn.role, "content": content}
    elif turn.role == "assistant":
        yield _assistant(content)
    else:
        yield from _results(content)
        text = "\n".join(block.text or "" for block in content if block.type == "text")
        if text or not any(block.type == "tool_result" for block in content):
            yield {"role": turn.role, "content": text}


def _results(blocks: list[ContentBlock]) -> Iterator[dict[str, Any]]:
    for block in blocks:
        if block.type == "tool_result":
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}


def _assistant(blocks: list[ContentBlock]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    if thought := "".join(block.thinking or "" for block in blocks if block.type == "thinking"):
        message["reasoning_content"] = thought
    message["content"] = "".join(block.text or "" for block in blocks if block.type == "text")
    calls = [_call(block) for block in blocks if block.type == "tool_use"]
    return message | ({"tool_calls": calls} if calls else {})


def _call(block: ContentBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _is_prefill(message: dict[str, Any]) -> bool:
    """Whether it is an assistant's text, which the answer goes on with."""
    return message["role"] == "assistant" and "tool_calls" not in message


def _function(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given | ({} if tool.strict is None else {"strict": tool.strict})}


def _choice(body: CountBody) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is None or not any(tool.is_own for tool in body.tools or ()):
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    return {
        "tool_choice": named if choice.type == "tool" else _CHOICES[choice.type],
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }


def _thinking(body: CountBody, reads: Collection[str]) -> dict[str, Any]:
    """Switch and effort of the reasoning, of templates that have them: clients send both to any model."""
    variables: dict[str, Any] = {}
    if any(name in reads for name in _SWITCHES):
        variables["enable_thinking"] = body.thinking is not None and body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort and "reasoning_effort" in reads:
        variables["reasoning_effort"] = body.output_config.effort
    return variables
