"""The fields of a chat's messages, in OpenAI's words.

Types only, and what a role must have. The string under a field is its description in /openapi.json and
docs/api.md.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from gateway.formats import unsupported
from gateway.formats.fields import RequestBody, given, needs, refuse


def _text_or_parts(value: Any, parts: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts")
    return parts(value)


def _only_text(kind: Any) -> Any:
    if kind not in ("text", "refusal"):
        raise ValueError(f"only text parts are supported, not {kind!r:.40}")
    return kind


def _system_role(role: str) -> str:
    """`developer` as `system`: chat templates know the older name."""
    return "system" if role == "developer" else role


class TextPart(RequestBody):
    """A part of a message's content. Only text is supported, and what an assistant said when it refused."""

    rules = tuple(needs(given("type", {"const": kind}), given(kind)) for kind in ("text", "refusal"))

    type: Annotated[str, BeforeValidator(_only_text, json_schema_input_type=Literal["text", "refusal"])]
    """The kind of part."""
    text: str = ""
    """The text."""
    refusal: str | None = None
    """With `refusal`: what was said. It is text to the model."""

    @model_validator(mode="wrap")
    @classmethod
    def _has_its_text(cls, value: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        part = read(value)
        if part.type not in part.model_fields_set:
            refuse(part.type, "is required")
        if part.type == "refusal":
            part.text = part.refusal or ""
        return part


# Text stays text. A wrapped list, not a union: errors then say which part is wrong.
Content = Annotated[
    list[TextPart], WrapValidator(_text_or_parts, json_schema_input_type=str | list[TextPart])
]


def _arguments(value: Any) -> Any:
    if not isinstance(value, str | dict):
        raise ValueError("must be the text of a JSON object, or an object")
    return value


class CalledFunction(RequestBody):
    """The called function."""

    name: str
    """The tool's name."""
    arguments: Annotated[Any, BeforeValidator(_arguments, json_schema_input_type=str | dict[str, Any])] = "{}"
    """The text of a JSON object; an object is taken too."""


class ChatToolCall(RequestBody):
    """A call that the assistant made."""

    id: str | None = None
    """Names the call for its result."""
    type: Literal["function"] = "function"
    """The kind of tool."""
    function: CalledFunction
    """The called function."""


_ASSISTANTS = given("role", {"const": "assistant"})
_SEVERAL = given("tool_calls", {"type": "array", "minItems": 1})
_CALLS = {"anyOf": [_SEVERAL, given("function_call")]}


class ChatMessage(RequestBody):
    """One message of a chat."""

    unsupported = unsupported.MESSAGE
    rules = (
        needs({"not": _ASSISTANTS}, {**given("content"), "not": _CALLS}),
        needs(given("role", {"const": "tool"}), given("tool_call_id")),
        needs(given("role", {"const": "function"}), given("name")),
        needs(given("function_call"), {"not": _SEVERAL}),
        needs({"not": _ASSISTANTS}, {"not": given("refusal", {"type": "string", "minLength": 1})}),
    )

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"], AfterValidator(_system_role)
    ]
    """The author of the message; a developer's are the system's, a tool's are the result of a call, and so
    are a function's, its older name.
    """
    content: Content | None = None
    """Text, or parts of text, which are joined by newlines unless the template reads parts."""
    refusal: str | None = None
    """The refusal of an assistant: it is the content of a message that has none."""
    name: str | None = None
    """Who speaks, for templates that show it."""
    reasoning: str | None = Field(
        None, validation_alias=AliasChoices("reasoning_content", "reasoning", "thinking")
    )
    """The reasoning before an assistant's answer; also under the names `reasoning` and `thinking`."""
    tool_calls: list[ChatToolCall] | None = None
    """The calls that an assistant made."""
    function_call: CalledFunction | None = None
    """The older form of a single call."""
    tool_call_id: str | None = None
    """The call whose result a tool's message is."""

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        self._take_function()
        if self.content is None and self.role != "assistant":
            refuse("content", "is required")
        if self.role != "assistant" and self.tool_calls:
            refuse("tool_calls", "are an assistant's alone")
        if self.role != "assistant" and self.refusal:
            refuse("refusal", "is an assistant's alone")
        if self.content is None and self.refusal:
            self.content = self.refusal  # type: ignore[assignment]  # text stays text
        if self.role == "tool" and self.tool_call_id is None:
            refuse("tool_call_id", "is required of a tool's message")
        return self

    def _take_function(self) -> None:
        """Reads a call and its result in the older form as the newer one: a function's name is their id."""
        called: CalledFunction | None = self.function_call
        if called is not None:
            if self.role != "assistant":
                refuse("function_call", "is an assistant's alone")
            if self.tool_calls:
                refuse("function_call", "is the older form of tool_calls: only one of them may be given")
            self.tool_calls = [ChatToolCall(id=f"call_{called.name}", function=called)]
            self.function_call = None
        if self.role == "function":
            if self.name is None:
                refuse("name", "is required of a function's message")
            self.role, self.tool_call_id = "tool", f"call_{self.name}"
