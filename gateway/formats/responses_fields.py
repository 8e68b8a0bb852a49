"""The body of /v1/responses: OpenAI's newer API, as far as it needs no memory of earlier requests.

Types only. `responses_request` reads the body as a chat. The string under a field is its description in
/openapi.json and docs/api.md.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from gateway.formats import unsupported
from gateway.formats.field_rules import given, needs
from gateway.formats.field_types import Count, Priority, Seed, TopLogprobs
from gateway.formats.fields import RequestBody, refuse
from gateway.formats.schema import SamplingFields, Speculation
from gateway.formats.tool_fields import (
    MAX_TOOLS,
    OtherTool,
    Parameters,
    ToolFields,
    functions_among,
    or_other,
    word_or_tool,
)

UNNAMED = "answer"
"""The name of a schema that has none."""

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class ItemPart(RequestBody):
    """A part of an item's content: its text, or what an assistant refused."""

    type: str = Field(json_schema_extra={"enum": [*_TEXTS, "refusal"]})
    """`input_text`, `output_text`, `text`, `reasoning_text`, `summary_text` or `refusal`."""
    text: str = ""
    """The text."""
    refusal: str = ""
    """The refusal."""

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        if self.type not in (*_TEXTS, "refusal"):
            refuse("type", f"must be a kind of text: {self.type!r:.40} is not supported")
        return self


def _text_or_parts(value: Any, parts: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts")
    return parts(value)


# Text stays text. A wrapped list, not a union: errors then say which part is wrong.
ItemText = Annotated[
    list[ItemPart], WrapValidator(_text_or_parts, json_schema_input_type=str | list[ItemPart])
]


def text_of(content: Any) -> str:
    """All of a content's text."""
    if isinstance(content, str):
        return content
    return "".join(part.text or part.refusal for part in content or ())


_NEEDED: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class ResponseItem(RequestBody):
    """One item of the chat so far. Without a type it is a message."""

    rules = (
        *(
            needs(given("type", {"const": type}), {"allOf": [given(name) for name in names]})
            for type, names in _NEEDED.items()
            if names
        ),
        needs({"not": given("type")}, {"allOf": [given(name) for name in _NEEDED["message"]]}),
    )

    type: str = Field("message", json_schema_extra={"enum": [*_NEEDED]})
    """`message`, `function_call`, `function_call_output` or `reasoning`."""
    role: Literal["system", "developer", "user", "assistant"] | None = None
    """Message: its author."""
    content: ItemText | None = None
    """Message or reasoning: text, or parts of text."""
    summary: list[ItemPart] | None = None
    """Reasoning without content: its summary."""
    call_id: str | None = None
    """Call and result: the id of the call."""
    name: str | None = None
    """Call: the tool."""
    arguments: str | None = None
    """Call: the text of a JSON object."""
    output: ItemText | None = None
    """Result: text, or parts of text."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        needed = _NEEDED.get(self.type)
        if needed is None:
            refuse("type", f"is not supported: {self.type!r:.40}; requests share no state")
        for name in needed:
            if getattr(self, name) is None:
                refuse(name, f"is required of a {self.type}")
        return self


def _text_or_items(value: Any, items: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of items")
    return items(value)


Items = Annotated[list[ResponseItem], Field(min_length=1)]
Input = Annotated[list[ResponseItem], WrapValidator(_text_or_items, json_schema_input_type=str | Items)]


class FlatTool(RequestBody):
    """A function that the model may ask for."""

    type: Literal["function"]
    """The kind of tool."""
    name: str = Field(max_length=256, pattern=r"^[\w.:/-]+$")
    """The name in calls: letters, digits and _ . : / -"""
    description: str | None = None
    """The description for the model."""
    parameters: Parameters | None = None
    """A JSON schema of its arguments; without one it takes none."""
    strict: bool | None = None
    """True: its arguments follow the schema, however the model comes to call it."""


AnyFlatTool = Annotated[FlatTool, WrapValidator(or_other, json_schema_input_type=FlatTool | OtherTool)]


class FlatName(RequestBody):
    """One of `tools`."""

    type: Literal["function"]
    """The kind of tool."""
    name: str
    """Its name."""


class FlatChoice(RequestBody):
    """The one tool that is to be called, or those that may be."""

    rules = (
        needs(given("type", {"const": "function"}), given("name")),
        needs(given("type", {"const": "allowed_tools"}), {"allOf": [given("mode"), given("tools")]}),
    )

    type: Literal["function", "allowed_tools"]
    """Which of the two."""
    name: str | None = None
    """With `function`: one of `tools`."""
    mode: Literal["auto", "required"] | None = None
    """With `allowed_tools`: `auto`: any number of calls; `required`: at least one."""
    tools: list[FlatName] | None = Field(None, min_length=1)
    """With `allowed_tools`: the only ones that may be called."""

    @model_validator(mode="after")
    def _says_which(self) -> Self:
        for name in ("name",) if self.type == "function" else ("mode", "tools"):
            if getattr(self, name) is None:
                refuse(name, f"is required with the type {self.type}")
        return self


FlatToolChoice = Annotated[
    FlatChoice,
    WrapValidator(word_or_tool, json_schema_input_type=Literal["none", "auto", "required"] | FlatChoice),
]


class FlatFormat(RequestBody):
    """The format of the answer's text."""

    rules = (needs(given("type", {"const": "json_schema"}), given("schema")),)

    type: Literal["text", "json_object", "json_schema"]
    """`text`: anything."""
    name: str | None = None
    """Not read, but repeated in the answer."""
    description: str | None = None
    """Not read, but repeated in the answer."""
    definition: dict[str, Any] | None = Field(None, validation_alias="schema")
    """With `json_schema`: the schema that the answer follows."""
    strict: bool | None = None
    """Not read: the answer follows the schema in any case."""

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if self.type == "json_schema" and self.definition is None:
            refuse("schema", "is required with the type json_schema")
        return self


class TextOptions(RequestBody):
    """The format of the answer's text."""

    unsupported = unsupported.RESPONSES_TEXT

    format: FlatFormat | None = None
    """Text, any JSON object, or a value that a JSON schema describes."""


class ReasoningOptions(RequestBody):
    """How the model reasons."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """How much, for templates that read it."""
    summary: str | None = None
    """Not read: the reasoning itself is shown."""


class ResponsesBody(SamplingFields):
    """The body of /v1/responses."""

    endpoint: ClassVar[str] = "responses"
    unsupported = unsupported.RESPONSES
    rules = (*SamplingFields.rules, *ToolFields.rules)

    model: str
    """The id of the served model."""
    input: Input
    """A user's text, or the items of the chat so far."""
    instructions: str | None = None
    """The system message before them."""
    stream: bool = False
    """Answers as server-sent events, as tokens come."""
    max_output_tokens: Count | None = None
    """The longest answer, in tokens. By default what the context has space for."""
    tools: list[AnyFlatTool] | None = Field(None, max_length=MAX_TOOLS)
    """The tools that the model may call. Those that are no functions are skipped and named in the reply."""
    tool_choice: FlatToolChoice | None = None
    """`auto`: as the model likes; `none`: no tool; `required`: at least one; an object: those it names."""
    parallel_tool_calls: bool = True
    """False: at most one call."""
    text: TextOptions | None = None
    """The format of the answer's text."""
    reasoning: ReasoningOptions | None = None
    """How the model reasons."""
    top_logprobs: TopLogprobs | None = None
    """Above 0: log-probabilities are returned, and this many of the likeliest tokens of each place."""
    include: list[str] | None = None
    """`message.output_text.logprobs`: log-probabilities are returned. Others are not read."""
    metadata: dict[str, str] | None = None
    """Repeated in the answer."""
    store: bool | None = None
    """Not read: nothing is stored."""
    seed: Seed | None = None
    """Fixes the whole answer; random unless given."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables for the model's chat template."""
    speculative: Speculation = Field(True)  # type: ignore[assignment]  # a bool stays one
    """False turns drafting off for this request; an object says how far its drafts reach at most."""
    priority: Priority = 0
    """Lower is earlier among the caller's own, each unit by a second: -100 to 100."""
    prompt_cache_key: str = Field("", max_length=512)
    """Names the conversation: its requests prefer one worker, also where its prefix is not cached yet."""
    timeout: float | None = Field(None, gt=0)
    """Seconds until the request fails. Without: none while tokens come, unless the server has a limit."""

    _skipped: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _skip_others(self) -> Self:
        self.tools, self._skipped = functions_among(self.tools)
        return self

    @property
    def skipped(self) -> tuple[str, ...]:
        """The tools of other kinds."""
        return self._skipped

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer tells log-probabilities."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
