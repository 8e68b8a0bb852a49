"""The bodies of /v1/messages and /v1/messages/count_tokens: Anthropic's API, as far as text models go.

First their types: the string under a field is its description in /openapi.json and docs/api.md. Then a body
is read as a chat: blocks become messages, calls and results OpenAI's.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from eyas.common.errors import InvalidRequest
from gateway.formats import unsupported
from gateway.formats.fields import (
    AtLeastOne,
    CacheSalt,
    Count,
    FromMinusOne,
    RequestBody,
    Stop,
    given,
    needs,
    refuse,
    validated,
)
from gateway.formats.schema import ChatBody
from gateway.formats.tool_fields import MAX_TOOLS, Parameters

_NEEDED: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "document": ("source",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
FIELDS = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config",
}
"""The names of a chat's fields in this API."""
_SHOWN = ("text", "document")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SWITCHES = ("enable_thinking", "thinking")


def _text_or_blocks(value: Any, blocks: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of blocks")
    return blocks(value)


class TextBlock(RequestBody):
    """A block that can only be text."""

    type: str = "text"
    """The kind of block: `text`."""
    text: str = ""
    """The text."""
    cache_control: dict[str, Any] | None = None
    """Not read: prefixes are cached by themselves."""

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        if self.type != "text":
            refuse("type", f"must be text: the model reads no {self.type!r:.40}")
        return self

    @property
    def shown(self) -> str:
        """What the model sees of it."""
        return self.text


# Text stays text. A wrapped list, not a union: errors then say which block is wrong.
Texts = Annotated[
    list[TextBlock], WrapValidator(_text_or_blocks, json_schema_input_type=str | list[TextBlock])
]


class DocumentSource(RequestBody):
    """The text of a document."""

    rules = (
        needs(given("type", {"const": "text"}), given("data")),
        needs(given("type", {"const": "content"}), given("content")),
    )

    type: Literal["text", "content"]
    """`text`: its text is `data`; `content`: it is `content`. Files are not read."""
    media_type: str | None = None
    """Not read: `data` is plain text."""
    data: str | None = None
    """The text."""
    content: Texts | None = None
    """Text, or blocks of text."""

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        if self.type == "text" and self.data is None:
            refuse("data", "is required of a document of text")
        if self.type == "content" and self.content is None:
            refuse("content", "is required of a document of content")
        return self

    @property
    def shown(self) -> str:
        """What the model sees of it."""
        return self.data or "" if self.type == "text" else _text(self.content)


class ShownBlock(RequestBody):
    """A text, or a document that holds text."""

    type: Literal["text", "document"] = "text"
    """`text` or `document`."""
    text: str | None = None
    """Text block: the text."""
    source: DocumentSource | None = None
    """Document: its text."""
    title: str | None = None
    """Document: a line before its text."""
    context: str | None = None
    """Document: what is to be known of it, on lines between title and text."""
    citations: dict[str, Any] | None = None
    """Document: not read, answers cite nothing."""
    cache_control: dict[str, Any] | None = None
    """Not read: prefixes are cached by themselves."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        for name in _NEEDED[self.type]:
            if getattr(self, name) is None:
                refuse(name, f"is required of {self.type}")
        return self

    @property
    def shown(self) -> str:
        """What the model sees of it."""
        if self.type == "text" or self.source is None:
            return self.text or ""
        return "\n".join(filter(None, (self.title, self.context, self.source.shown)))


Shown = Annotated[
    list[ShownBlock], WrapValidator(_text_or_blocks, json_schema_input_type=str | list[ShownBlock])
]


class ContentBlock(ShownBlock):
    """A part of a message."""

    rules = tuple(
        needs(given("type", {"const": kind}), {"allOf": [given(name) for name in names]})
        for kind, names in _NEEDED.items()
        if names
    )

    type: Literal["text", "document", "thinking", "redacted_thinking", "tool_use", "tool_result"]  # type: ignore[assignment]
    """`text`, `document`, `thinking`, `redacted_thinking`, `tool_use` or `tool_result`."""
    thinking: str | None = None
    """Thinking block: the model's reasoning."""
    signature: str | None = None
    """Thinking block: not read."""
    data: str | None = None
    """Redacted thinking block: not read."""
    id: str | None = None
    """Call: the id that its result refers to."""
    name: str | None = None
    """Call: the tool."""
    input: dict[str, Any] | None = None
    """Call: the arguments."""
    tool_use_id: str | None = None
    """Result: the id of the call."""
    content: Shown | None = None
    """Result: text, or blocks of text and documents."""
    is_error: bool | None = None
    """Result: whether the call failed; the model sees the text alone."""


Blocks = Annotated[
    list[ContentBlock], WrapValidator(_text_or_blocks, json_schema_input_type=str | list[ContentBlock])
]


class ChatTurn(RequestBody):
    """One message of the chat."""

    role: Literal["user", "assistant", "system"]
    """The author of the message."""
    content: Blocks
    """Text, or blocks."""


class AnthropicTool(RequestBody):
    """A tool that the model may call. One of another type than `custom` is a provider's own: it is skipped,
    and `x-eyas-ignored` names it.
    """

    type: str = "custom"
    """The kind of tool."""
    name: str = Field(max_length=256, pattern=r"^[\w.:/-]+$")
    """The name in calls: letters, digits and _ . : / -"""
    description: str | None = None
    """The description for the model."""
    input_schema: Parameters | None = None
    """A JSON schema of its arguments."""
    strict: bool | None = None
    """True: its arguments follow the schema, however the model comes to call it."""
    cache_control: dict[str, Any] | None = None
    """Not read: prefixes are cached by themselves."""

    @property
    def is_own(self) -> bool:
        """Whether it is the caller's own function."""
        return self.type == "custom"


class AnthropicChoice(RequestBody):
    """The tools that are to be called."""

    rules = (needs(given("type", {"const": "tool"}), given("name")),)

    type: Literal["auto", "any", "tool", "none"]
    """`auto`: as the model likes; `any`: at least one; `tool`: the one with this name; `none`: no tool."""
    name: str | None = None
    """With `tool`: one of `tools`."""
    disable_parallel_tool_use: bool = False
    """At most one call."""

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if self.type == "tool" and self.name is None:
            refuse("name", "is required with the type tool")
        return self


class ThinkingOptions(RequestBody):
    """Whether the model reasons before its answer, where its template has a switch."""

    type: Literal["enabled", "disabled", "adaptive"]
    """`adaptive` is as `enabled`."""
    budget_tokens: Count | None = None
    """Not read: reasoning counts in `max_tokens`."""
    display: str | None = None
    """Not read: the reasoning is always shown."""


class OutputFormat(RequestBody):
    """The format of the answer's text."""

    type: Literal["json_schema"]
    """The one kind."""
    definition: dict[str, Any] = Field(validation_alias="schema")
    """The schema that the answer follows."""


class OutputConfig(RequestBody):
    """The format of the answer, and its reasoning effort."""

    format: OutputFormat | None = None
    """A JSON schema that the answer follows."""
    effort: str | None = None
    """How much the model reasons, for templates that read it."""


class CountBody(RequestBody):
    """The body of /v1/messages/count_tokens."""

    endpoint: ClassVar[str] = "count_tokens"
    unsupported = unsupported.MESSAGES

    model: str
    """The id of the served model."""
    messages: list[ChatTurn] = Field(min_length=1)
    """The chat so far. Turns of one role in a row are one; an assistant's last one is continued."""
    system: Texts | None = None
    """The system message before them: text, or blocks of text."""
    tools: list[AnthropicTool] | None = Field(None, max_length=MAX_TOOLS)
    """The tools that the model may call."""
    tool_choice: AnthropicChoice | None = None
    """Which of them are to be called."""
    thinking: ThinkingOptions | None = None
    """Whether the model reasons first; without it, it does not where its template has a switch."""
    output_config: OutputConfig | None = None
    """The format and effort of the answer."""
    output_format: OutputFormat | None = None
    """The older name of `output_config.format`, which wins."""

    @property
    def format(self) -> OutputFormat | None:
        """The format of the answer, by either name."""
        return (self.output_config and self.output_config.format) or self.output_format


class MessagesBody(CountBody):
    """The body of /v1/messages."""

    endpoint: ClassVar[str] = "messages"

    max_tokens: AtLeastOne
    """The longest answer, in tokens; more than the context has space for is what it has."""
    stream: bool = False
    """Answers as server-sent events, as tokens come."""
    temperature: float | None = Field(None, ge=0, le=2)
    """0 takes the likeliest token. The model's default, else 1."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Keeps the likeliest tokens that together have this probability. The model's default, else 1."""
    top_k: FromMinusOne | None = None
    """Keeps this many of the likeliest tokens. The model's default, else all."""
    stop_sequences: list[Stop] | None = Field(None, max_length=16)
    """Texts that end the answer."""
    cache_salt: CacheSalt = ""
    """Cached prefixes are shared with requests of the same salt alone, on every tier."""
    metadata: dict[str, Any] | None = None
    """Not read."""
    service_tier: str | None = None
    """Not read."""


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
        options = ("max_tokens", "stream", "temperature", "top_p", "top_k", "cache_salt")
        chat |= {name: value for name in options if (value := getattr(body, name)) is not None}
        chat["stop"] = body.stop_sequences
    if (format := body.format) is not None:
        schema = {"name": "answer", "schema": format.definition}
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
    return "\n".join(block.shown for block in content)


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
        text = "\n".join(block.shown for block in content if block.type in _SHOWN)
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
    message["content"] = "".join(block.shown for block in blocks if block.type in _SHOWN)
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
