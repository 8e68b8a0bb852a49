"""The body of /v1/responses: OpenAI's newer API, as far as it needs no memory of earlier requests.

First its types: the string under a field is its description in /openapi.json and docs/api.md. Then the body
is read as a chat: items become messages, flat tools OpenAI's older objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from eyas.common.errors import InvalidRequest
from gateway.formats import unsupported
from gateway.formats.fields import (
    CacheSalt,
    Count,
    Priority,
    RequestBody,
    Seed,
    TopLogprobs,
    given,
    needs,
    refuse,
    validated,
)
from gateway.formats.schema import ChatBody, SamplingFields, Speculation
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
_AS_THEY_ARE = (
    *(name for name in SamplingFields.model_fields if name != "no_stop_trim"),
    *("seed", "parallel_tool_calls", "chat_template_kwargs", "priority"),
    *("prompt_cache_key", "cache_salt", "timeout"),
)
FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""The names of a chat's fields in this API."""


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
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
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
    """`message`, `function_call`, `custom_tool_call`, a result of either (`..._output`), or `reasoning`."""
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
    input: str | None = None
    """Call of a custom tool: its text, which the model sees as the argument `input`."""
    output: ItemText | None = None
    """Result: text, or parts of text."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        needed = _NEEDED.get(self.type)
        if needed is None:
            refuse(
                "type", f"is not supported: {self.type!r:.40}; the model reads messages, calls and results"
            )
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
    cache_salt: CacheSalt = ""
    """Cached prefixes are shared with requests of the same salt alone, on every tier."""
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
    if item.type in ("function_call", "custom_tool_call"):
        is_custom = item.type == "custom_tool_call"
        arguments = {"input": item.input} if is_custom else item.arguments or "{}"
        function = {"name": item.name, "arguments": arguments}
        return {"tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}
    if item.type == "message" and item.role == "assistant":
        return {"content": text_of(item.content)}
    return None


def _other(item: ResponseItem) -> dict[str, Any]:
    if item.type in ("function_call_output", "custom_tool_call_output"):
        return {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
    return {"role": item.role, "content": text_of(item.content)}
