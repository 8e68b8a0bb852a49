"""The bodies of /v1/messages and /v1/messages/count_tokens: Anthropic's API, as far as text models go.

Types only. `anthropic_request` reads a body as a chat. The string under a field is its description in
/openapi.json and docs/api.md.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from gateway.formats import unsupported
from gateway.formats.field_rules import given, needs
from gateway.formats.field_types import AtLeastOne, Count, FromMinusOne, Stop
from gateway.formats.fields import RequestBody, refuse
from gateway.formats.tool_fields import MAX_TOOLS, Parameters

_NEEDED: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}


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


# Text stays text. A wrapped list, not a union: errors then say which block is wrong.
Texts = Annotated[
    list[TextBlock], WrapValidator(_text_or_blocks, json_schema_input_type=str | list[TextBlock])
]


class ContentBlock(RequestBody):
    """A part of a message."""

    rules = tuple(
        needs(given("type", {"const": kind}), {"allOf": [given(name) for name in names]})
        for kind, names in _NEEDED.items()
        if names
    )

    type: str = Field(json_schema_extra={"enum": [*_NEEDED]})
    """`text`, `thinking`, `redacted_thinking`, `tool_use` or `tool_result`."""
    text: str | None = None
    """Text block: the text."""
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
    content: Texts | None = None
    """Result: text, or blocks of text."""
    is_error: bool | None = None
    """Result: whether the call failed; the model sees the text alone."""
    cache_control: dict[str, Any] | None = None
    """Not read: prefixes are cached by themselves."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        needed = _NEEDED.get(self.type)
        if needed is None:
            refuse("type", f"is not supported: {self.type!r:.40}; the model reads text, calls and results")
        for name in needed:
            if getattr(self, name) is None:
                refuse(name, f"is required of {self.type}")
        return self


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
    metadata: dict[str, Any] | None = None
    """Not read."""
    service_tier: str | None = None
    """Not read."""
