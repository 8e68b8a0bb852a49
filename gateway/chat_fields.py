"""The fields of a chat's messages and tools, in OpenAI's words.

Types only, and what a role must have. It refuses to know what templates make of messages and models of tools.
The string under a field is its description in /openapi.json and docs/api.md.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from gateway import unsupported
from gateway.field_rules import given, needs
from gateway.fields import Body, refuse

MAX_TOOLS = 512


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


class TextPart(Body):
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


class CalledFunction(Body):
    """What was called."""

    name: str
    """The tool's name."""
    arguments: Annotated[Any, BeforeValidator(_arguments, json_schema_input_type=str | dict[str, Any])] = "{}"
    """The text of a JSON object; an object is taken too."""


class ToolCall(Body):
    """A call that the assistant made."""

    id: str | None = None
    """Names the call for its result."""
    type: Literal["function"] = "function"
    """The kind of tool."""
    function: CalledFunction
    """What was called."""


_ASSISTANTS = given("role", {"const": "assistant"})
_CALLS = given("tool_calls", {"type": "array", "minItems": 1})


class ChatMessage(Body):
    """One message of a chat."""

    unsupported = unsupported.MESSAGE
    rules = (
        needs({"not": _ASSISTANTS}, {**given("content"), "not": _CALLS}),
        needs(given("role", {"const": "tool"}), given("tool_call_id")),
    )

    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], AfterValidator(_system_role)]
    """Whose words these are; a developer's are the system's, a tool's are the result of a call."""
    content: Content | None = None
    """Text, or parts of text, which are joined by newlines unless the template reads parts."""
    refusal: str | None = None
    """What an assistant said when it refused: it is the content of a message that has none."""
    name: str | None = None
    """Who speaks, for templates that show it."""
    reasoning: str | None = Field(
        None, validation_alias=AliasChoices("reasoning_content", "reasoning", "thinking")
    )
    """What an assistant thought before its answer; also under the names `reasoning` and `thinking`."""
    tool_calls: list[ToolCall] | None = None
    """The calls that an assistant made."""
    tool_call_id: str | None = None
    """The call whose result a tool's message is."""

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
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


def _of_an_object(parameters: dict[str, Any]) -> dict[str, Any]:
    if parameters.get("type", "object") != "object":
        raise ValueError("must be the schema of an object: its type must be 'object'")
    return parameters


Parameters = Annotated[
    dict[str, Any],
    AfterValidator(_of_an_object),
    Field(json_schema_extra={"properties": {"type": {"const": "object"}}}),
]


class FunctionTool(Body):
    """A function that the model may ask for."""

    name: str = Field(max_length=256, pattern=r"^[\w.:/-]+$")
    """What calls name it by: letters, digits and _ . : / -"""
    description: str | None = None
    """What it does, for the model."""
    parameters: Parameters | None = None
    """A JSON schema of its arguments; without one it takes none."""
    strict: bool | None = None
    """True: its arguments follow the schema, however the model comes to call it."""


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    """The kind of tool."""
    function: FunctionTool
    """The function."""
    _written: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        tool = read(value)
        tool._written = value if isinstance(value, dict) else {}
        return tool

    @property
    def written(self) -> dict[str, Any]:
        """The tool as its caller wrote it, which is how models read it: keys in order, unknown ones too."""
        return self._written


class NamedFunction(Body):
    """A function by its name."""

    name: str
    """One of `tools`."""


class ToolName(Body):
    """One of `tools`."""

    type: Literal["function"]
    """The kind of tool."""
    function: NamedFunction
    """The function."""


class AllowedTools(Body):
    """Some of `tools`."""

    mode: Literal["auto", "required"]
    """`auto`: any number of calls; `required`: at least one."""
    tools: list[ToolName] = Field(min_length=1)
    """The only ones that may be called."""


_ONE, _SOME = given("type", {"const": "function"}), given("type", {"const": "allowed_tools"})


class ChosenTools(Body):
    """The one tool that is to be called, or those that may be."""

    rules = (needs(_ONE, given("function")), needs(_SOME, given("allowed_tools")))

    type: Literal["function", "allowed_tools"]
    """Which of the two."""
    function: NamedFunction | None = None
    """With `function`: the tool."""
    allowed_tools: AllowedTools | None = None
    """With `allowed_tools`: the tools, and whether one must be called."""

    @model_validator(mode="after")
    def _says_which(self) -> Self:
        if getattr(self, self.type) is None:
            refuse(self.type, f"is required with the type {self.type}")
        return self


def word_or_tool(value: Any, tool: ValidatorFunctionWrapHandler) -> Any:
    """A word of `tool_choice`, or what `tool` makes of an object. Raises ValueError for anything else."""
    if value in ("none", "auto", "required"):
        return value
    if not isinstance(value, dict):
        raise ValueError("must be none, auto, required, or an object that names tools")
    return tool(value)


# A wrapped object, not a union: errors then say what is wrong with it.
ToolChoice = Annotated[
    ChosenTools,
    WrapValidator(word_or_tool, json_schema_input_type=Literal["none", "auto", "required"] | ChosenTools),
]


_NAMES_TOOLS = given("tool_choice", {"anyOf": [{"const": "required"}, {"type": "object"}]})


class ToolFields(Body):
    """Which tools the model may call."""

    rules: ClassVar[tuple[dict[str, Any], ...]] = (
        needs(_NAMES_TOOLS, given("tools", {"type": "array", "minItems": 1})),
    )

    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    """The tools that the model may call."""
    tool_choice: ToolChoice | None = None
    """`auto`: as the model likes; `none`: no tool; `required`: at least one; an object: those it names."""
    parallel_tool_calls: bool = True
    """False: at most one call."""

    @model_validator(mode="after")
    def _choice_is_among_them(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if twice := sorted(name for name in set(names) if names.count(name) > 1):
            refuse("tools", f"name {twice[0]!r:.100} twice: each needs a name of its own")
        for name in sorted(self._chosen - set(names)):
            refuse("tool_choice", f"names {name!r:.100}, which is none of tools" if names else "needs tools")
        if self.must_call and not self.tools:
            refuse("tool_choice", "needs tools")
        return self

    @property
    def _chosen(self) -> set[str]:
        """The tools that the choice names."""
        choice: ChosenTools | str | None = self.tool_choice
        if not isinstance(choice, ChosenTools):
            return set()
        if choice.type == "function":
            return {choice.function.name} if choice.function else set()
        return {tool.function.name for tool in choice.allowed_tools.tools} if choice.allowed_tools else set()

    @property
    def named_tool(self) -> str | None:
        """The one tool that is to be called, if the body names it."""
        choice: ChosenTools | str | None = self.tool_choice
        is_one = isinstance(choice, ChosenTools) and choice.function and choice.type == "function"
        return choice.function.name if is_one else None

    @property
    def must_call(self) -> bool:
        """Whether the answer must be calls."""
        choice: ChosenTools | str | None = self.tool_choice
        if not isinstance(choice, ChosenTools):
            return choice == "required"
        return choice.type == "function" or choice.allowed_tools.mode == "required"

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that may be called: with the choice `none`, none; with `allowed_tools`, those."""
        choice: ChosenTools | str | None = self.tool_choice
        tools: list[Tool] = [] if choice == "none" else self.tools or []
        if isinstance(choice, ChosenTools) and choice.type == "allowed_tools":
            tools = [tool for tool in tools if tool.function.name in self._chosen]
        return tools
