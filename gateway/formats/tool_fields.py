"""The fields of a chat's tools, in OpenAI's words, the newer ones and the older ones.

Types only, and what goes together. The string under a field is its description in /openapi.json and
docs/api.md.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from gateway.formats.fields import RequestBody, given, needs, refuse

MAX_TOOLS = 512
T = TypeVar("T")


def _of_an_object(parameters: dict[str, Any]) -> dict[str, Any]:
    if parameters.get("type", "object") != "object":
        raise ValueError("must be the schema of an object: its type must be 'object'")
    return parameters


Parameters = Annotated[
    dict[str, Any],
    AfterValidator(_of_an_object),
    Field(json_schema_extra={"properties": {"type": {"const": "object"}}}),
]


def _without_nulls(said: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that are not null. A null within a schema has a meaning, and stays."""
    return {name: value for name, value in said.items() if value is not None}


class FunctionTool(RequestBody):
    """A function that the model may ask for."""

    name: str = Field(max_length=256, pattern=r"^[\w.:/-]+$")
    """The name in calls: letters, digits and _ . : / -"""
    description: str | None = None
    """The description for the model."""
    parameters: Parameters | None = None
    """A JSON schema of its arguments; without one it takes none."""
    strict: bool | None = None
    """True: its arguments follow the schema, however the model comes to call it."""


class ChatTool(RequestBody):
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
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            tool._written = _without_nulls(value) | {"function": _without_nulls(value["function"])}
        return tool

    @classmethod
    def of(cls, function: FunctionTool) -> Self:
        """The tool that is this function."""
        tool = cls(type="function", function=function)
        tool._written = {"type": "function", "function": function.model_dump(exclude_none=True)}
        return tool

    @property
    def written(self) -> dict[str, Any]:
        """The tool as its caller wrote it, which is how models read it: keys in order, unknown ones too."""
        return self._written


class OtherTool(RequestBody):
    """A tool of a kind that other servers run themselves, such as `web_search`: it is skipped and named."""

    type: str = Field(json_schema_extra={"not": {"const": "function"}})
    """Its kind."""


def or_other(value: Any, function: ValidatorFunctionWrapHandler) -> Any:
    """Validates a tool by `function`; a tool of another kind becomes an `OtherTool`."""
    kind = value.get("type", "function") if isinstance(value, dict) else "function"
    return OtherTool(type=kind) if isinstance(kind, str) and kind != "function" else function(value)


def functions_among(tools: list[T] | None) -> tuple[list[T] | None, tuple[str, ...]]:
    """The functions, and the places and kinds of the other tools."""
    others = {i: tool.type for i, tool in enumerate(tools or ()) if isinstance(tool, OtherTool)}
    if tools is None or not others:
        return tools, ()
    functions = [tool for tool in tools if not isinstance(tool, OtherTool)]
    return functions or None, tuple(f"tools[{i}]:{kind}" for i, kind in others.items())


AnyTool = Annotated[ChatTool, WrapValidator(or_other, json_schema_input_type=ChatTool | OtherTool)]


class NamedFunction(RequestBody):
    """A function by its name."""

    name: str
    """One of `tools`."""


class ToolName(RequestBody):
    """One of `tools`."""

    type: Literal["function"]
    """The kind of tool."""
    function: NamedFunction
    """The function."""


class AllowedTools(RequestBody):
    """Some of `tools`."""

    mode: Literal["auto", "required"]
    """`auto`: any number of calls; `required`: at least one."""
    tools: list[ToolName] = Field(min_length=1)
    """The only ones that may be called."""


_ONE, _SOME = given("type", {"const": "function"}), given("type", {"const": "allowed_tools"})


class ChosenTools(RequestBody):
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

    @property
    def named(self) -> str | None:
        """The one tool that is to be called, if it is one."""
        return self.function.name if self.type == "function" and self.function else None

    @property
    def allowed(self) -> set[str] | None:
        """The only tools that may be called; None: all."""
        some = self.allowed_tools if self.type == "allowed_tools" else None
        return {tool.function.name for tool in some.tools} if some else None

    @property
    def names(self) -> set[str]:
        """The tools that it names."""
        return self.allowed or ({self.named} if self.named else set())

    @property
    def demands(self) -> bool:
        """Whether the answer must be calls."""
        return self.type == "function" or bool(self.allowed_tools and self.allowed_tools.mode == "required")


def word_or_tool(value: Any, tool: ValidatorFunctionWrapHandler) -> Any:
    """A word of `tool_choice`, or what `tool` makes of an object. Raises ValueError for anything else."""
    if value in ("none", "auto", "required"):
        return value
    if not isinstance(value, dict):
        raise ValueError("must be none, auto, required, or an object that names tools")
    return tool(value)


def _word_or_function(value: Any, function: ValidatorFunctionWrapHandler) -> Any:
    if value in ("none", "auto"):
        return value
    if not isinstance(value, dict):
        raise ValueError("must be none, auto, or an object that names a function")
    return function(value)


# Wrapped objects, not unions: errors then say what is wrong with them.
OlderChoice = Annotated[
    NamedFunction,
    WrapValidator(_word_or_function, json_schema_input_type=Literal["none", "auto"] | NamedFunction),
]
ToolChoice = Annotated[
    ChosenTools,
    WrapValidator(word_or_tool, json_schema_input_type=Literal["none", "auto", "required"] | ChosenTools),
]


_NAMES_TOOLS = given("tool_choice", {"anyOf": [{"const": "required"}, {"type": "object"}]})


class ToolFields(RequestBody):
    """The tools that the model may call."""

    rules: ClassVar[tuple[dict[str, Any], ...]] = (
        needs(_NAMES_TOOLS, given("tools", {"type": "array", "minItems": 1})),
    )

    tools: list[AnyTool] | None = Field(None, max_length=MAX_TOOLS)
    """The tools that the model may call. Those that are no functions are skipped and named in the reply."""
    functions: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    """OpenAI's older name of `tools`, of which one is called at most: the answer has a `function_call`."""
    function_call: OlderChoice | None = None
    """The older name of `tool_choice`: `none`, `auto`, or an object that names one of `functions`."""
    tool_choice: ToolChoice | None = None
    """`auto`: as the model likes; `none`: no tool; `required`: at least one; an object: those it names."""
    parallel_tool_calls: bool = True
    """False: at most one call."""
    _speaks_functions: bool = PrivateAttr(False)
    _skipped: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _choice_is_among_them(self) -> Self:
        self.tools, self._skipped = functions_among(self.tools)
        self._take_functions()
        names = [tool.function.name for tool in self.tools or ()]
        if twice := sorted(name for name in set(names) if names.count(name) > 1):
            refuse(self.tools_field, f"name {twice[0]!r:.100} twice: each needs a name of its own")
        choice = self._choice
        for name in sorted(choice.names - set(names)) if choice else ():
            refuse("tool_choice", f"names {name!r:.100}, which is none of tools" if names else "needs tools")
        if self.must_call and not self.tools:
            refuse("tool_choice", "needs tools")
        return self

    def _take_functions(self) -> None:
        """Reads the older fields as the newer ones."""
        functions, older = self.functions or [], cast("NamedFunction | str | None", self.function_call)
        named = older if isinstance(older, NamedFunction) else None
        if functions and self.tools:
            refuse("functions", "is the older name of tools: only one of them may be given")
        if named is not None and named.name not in (function.name for function in functions):
            refuse("function_call", f"names {named.name!r:.100}, which is none of functions")
        if not functions:
            return
        self.tools = [ChatTool.of(function) for function in functions]
        self.functions, self.parallel_tool_calls, self._speaks_functions = None, False, True
        choice = older if named is None else ChosenTools(type="function", function=named)
        self.tool_choice = cast("ChosenTools | None", choice)

    @property
    def skipped(self) -> tuple[str, ...]:
        """The tools of other kinds."""
        return self._skipped

    @property
    def speaks_functions(self) -> bool:
        """Whether the body, and so its answer, has OpenAI's older words for tools."""
        return self._speaks_functions

    @property
    def tools_field(self) -> str:
        """The caller's name of the field with the tools."""
        return "functions" if self._speaks_functions else "tools"

    def tool_field(self, number: int) -> str:
        """The caller's name of the field with one tool's function."""
        return f"functions[{number}]" if self._speaks_functions else f"tools[{number}].function"

    @property
    def _choice(self) -> ChosenTools | None:
        """The choice, if it names tools."""
        choice: ChosenTools | str | None = self.tool_choice
        return choice if isinstance(choice, ChosenTools) else None

    @property
    def named_tool(self) -> str | None:
        """The one tool that is to be called, if the body names it."""
        return self._choice.named if self._choice else None

    @property
    def must_call(self) -> bool:
        """Whether the answer must be calls."""
        choice: ChosenTools | str | None = self.tool_choice
        return choice == "required" or (self._choice is not None and self._choice.demands)

    @property
    def callable_tools(self) -> list[ChatTool]:
        """The tools that may be called: with the choice `none`, none; with `allowed_tools`, those."""
        choice: ChosenTools | str | None = self.tool_choice
        tools: list[ChatTool] = [] if choice == "none" else self.tools or []
        allowed = self._choice.allowed if self._choice else None
        return [tool for tool in tools if allowed is None or tool.function.name in allowed]
