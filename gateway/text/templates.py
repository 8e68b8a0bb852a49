"""Chat templates: they turn a list of messages into the prompt text that the model was trained on.

Templates come from the model's folder; they run in a sandbox that bounds their steps and output. jinja2 runs
them as transformers does. The changes that a template makes to texts are read off jinja2's syntax trees: a
caller can hide a control token behind one, as cutting `/think` out of `<|im_/thinkend|>` makes one;
`caller_text` looks for tokens.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eyas.common.errors import ConfigError, InvalidRequest

Message = Mapping[str, Any]  # as templates read it: role, content, tool_calls and so on

MAX_STEPS = 250_000  # loop iterations and calls per rendering
MAX_LENGTH = 8 * 1024 * 1024  # characters per rendering
MAX_BITS = 1 << 14  # of a number
_WIDE = re.compile(r"%[^a-zA-Z%]*([0-9]{5}|\*)")
_STEPS = "steps so far"  # a variable whose name no template can write
_MARK = "<|the final message ends here|>"
_CUT = {"replace", "split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix"}
_CUT_ANYWHERE = {"splitlines", "striptags"}
_STRIP = {"strip", "lstrip", "rstrip", "trim"}
_CASES = {"upper", "lower", "title", "capitalize", "swapcase", "casefold"}
_SPACES = "".join(chr(code) for code in range(0x3001) if chr(code).isspace())


class TooManySteps(Exception):
    """A template takes more steps than it may; who gave it the steps decides what follows."""


class ChatTemplate:
    """A model's compiled template, or several by name: `tool_use` counts for chats with tools.

    `special`: values of the variables it may use, such as bos_token.
    """

    def __init__(
        self, sources: str | Mapping[str, str], special: Mapping[str, str], origin: str = "the chat template"
    ) -> None:
        """Raises ConfigError, naming `origin`, if a template does not compile, or `default` is not there."""
        self._special = dict(special)
        self._sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        if "default" not in self._sources:
            raise ConfigError(f"{origin} has no template named default", param="model")
        self._templates = {name: _compiled(source, origin) for name, source in self._sources.items()}
        trees = [_ENVIRONMENT.parse(source) for source in self._sources.values()]
        self.reads: frozenset[str] = frozenset().union(*map(find_undeclared_variables, trees))
        self.lists_parts = any(map(_lists_parts, trees))
        self.cuts = cuts_of(trees)

    @property
    def definition(self) -> dict[str, Any]:
        """The definition from which another process makes the same template."""
        return {"sources": self._sources, "special": self._special}

    def mentions(self, text: str) -> bool:
        """Whether `text` is part of a template's source."""
        return any(text in source for source in self._sources.values())

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        steps: int = MAX_STEPS,
    ) -> str:
        """The prompt that asks for the next assistant message, or for the rest of the last one.

        `template_kwargs`: further variables of the template. `tools`: OpenAI's objects, as the caller wrote
        them. `steps`: how many loop iterations and calls it may take.

        Raises InvalidRequest if the template refuses the messages or fails on them, TooManySteps if it takes
        more steps.
        """
        chat = [dict(message) for message in messages]
        if continue_final_message:
            final, chat[-1]["content"] = _marked(chat[-1].get("content"))
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        text = self._run(
            self._templates[name],
            {
                "documents": None,
                **self._special,
                **(template_kwargs or {}),
                "messages": chat,
                "tools": tools or None,
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
                _STEPS: _StepBudget(steps),
            },
        )
        return _cut_at_mark(text, final) if continue_final_message else text

    @staticmethod
    def _run(template: Template, variables: Mapping[str, Any]) -> str:
        try:
            return template.render(variables)
        except _OverBudget as error:
            raise TooManySteps(f"the chat template refused the messages: {error}") from None
        except TemplateError as error:
            reason = f"the chat template refused the messages: {error!s:.500}"
        except Exception as error:  # the template is a program, and may fail as programs do
            reason = f"the chat template failed on the messages: {type(error).__name__}: {error!s:.500}"
        raise InvalidRequest(reason, param="messages")


def _compiled(source: str, origin: str) -> Template:
    try:
        return _ENVIRONMENT.from_string(source)
    except Exception as error:  # a template can fail the compiler in any way
        line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        raise ConfigError(f"{origin} does not compile: {line}{error}", param="model") from error


def _lists_parts(tree: nodes.Template) -> bool:
    """Whether the template goes through the parts of a message's content: it then takes them as a list."""
    return any(
        isinstance(name, nodes.Getattr | nodes.Getitem) and _field(name) == "content"
        for loop in tree.find_all(nodes.For)
        for name in (loop.iter, *loop.iter.find_all((nodes.Getattr, nodes.Getitem)))
    )


def _check_product(left: Any, right: Any) -> None:
    """Raises TemplateError if a text or list repeated, or a product of numbers, is too large."""
    many, times = (left, right) if hasattr(left, "__len__") else (right, left)
    if not hasattr(many, "__len__"):
        if sum(value.bit_length() for value in (left, right) if isinstance(value, int)) > MAX_BITS:
            raise TemplateError("it computes a number that is too large")
    elif isinstance(times, int) and len(many) * times > MAX_LENGTH:
        raise TemplateError(f"it writes more than {MAX_LENGTH} characters")


def _field(name: nodes.Getattr | nodes.Getitem) -> Any:
    if isinstance(name, nodes.Getattr):
        return name.attr
    return name.arg.value if isinstance(name.arg, nodes.Const) else None


def _marked(content: Any) -> tuple[str, Any]:
    """The text at the end of the last message's content, and the content with the mark behind it.

    Raises InvalidRequest if there is no text to continue.
    """
    if isinstance(content, str):
        return content, f"{content}{_MARK} "
    if isinstance(content, list) and content and isinstance(text := content[-1].get("text"), str):
        return text, [*content[:-1], {**content[-1], "text": f"{text}{_MARK} "}]
    raise InvalidRequest("the final message has no text that could be continued", param="messages")


def _cut_at_mark(text: str, final: str) -> str:
    """The prompt up to where its final message ends, stripped where the template strips messages."""
    before, mark, after = text.rpartition(_MARK)
    if not mark or final.strip() not in before:
        raise InvalidRequest(
            "the chat template changes the final message, so it cannot be continued", param="messages"
        )
    return before if after.startswith(" ") else before.rstrip()


class _BoundedSandbox(ImmutableSandboxedEnvironment):
    """A sandbox that also bounds how long a template runs and how much it writes."""

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _step(context)
        return super().call(context, function, *args, **kwargs)

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The result of an operator. Raises TemplateError where that alone would take long."""
        if operator == "**" and not (abs(left) < 1 << 64 and abs(right) <= 64):
            raise TemplateError("it raises to a power that is too high")
        if operator == "*":
            _check_product(left, right)
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise TemplateError("it formats with a width that is too large")
        result = super().call_binop(context, operator, left, right)
        return _bounded(result) if isinstance(result, str) else result

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Passes what every loop iterates over through the filter that counts iterations."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        for joined in list(template.find_all(nodes.Concat)):
            parts = nodes.Concat(joined.nodes, lineno=joined.lineno)
            bounded = nodes.Filter(parts, "bounded", [], [], None, None, lineno=joined.lineno)
            joined.nodes = [bounded]
        return template

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins what a template, or a macro in it, has written. Raises TemplateError if it is too long."""
        written, length = [], 0
        for part in parts:
            length += len(part)
            if length > MAX_LENGTH:
                raise TemplateError(f"it writes more than {MAX_LENGTH} characters")
            written.append(part)
        return "".join(written)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training. Here only its content matters."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return caller()


class _OverBudget(TemplateError):
    """A rendering has used up its steps."""


class _StepBudget:
    """The steps that a rendering has left."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _OverBudget(f"it takes more than {self._most} steps")


def _step(context: Context) -> None:
    context.resolve(_STEPS).take()


def _bounded(value: str) -> str:
    """The text that a `~` made. Raises TemplateError if it is too long."""
    if len(value) > MAX_LENGTH:
        raise TemplateError(f"it writes more than {MAX_LENGTH} characters")
    return value


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _step(context)
        yield item


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: the built-in filter escapes for HTML, which prompts are not."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _environment() -> _BoundedSandbox:
    environment = _BoundedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters |= {"tojson": _to_json, "counted": _counted, "bounded": _bounded}
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


_ENVIRONMENT = _environment()


@dataclass(frozen=True)
class TemplateCuts:
    """`words`: what is cut out or split at; an empty one is anywhere. `looked_for`: all texts that the
    template could look for. `ends`: characters that it strips. `changes_case`: it writes other letters.
    """

    words: frozenset[str] = frozenset()
    looked_for: frozenset[str] = frozenset()
    ends: str = _SPACES
    changes_case: bool = False


def cuts_of(trees: Iterable[nodes.Template]) -> TemplateCuts:
    """Returns how these templates cut texts, by the functions that they call."""
    words: set[str] = set()
    looked_for: set[str] = set()
    ends, changes_case = set(_SPACES), False
    for tree in trees:
        looked_for |= {const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str)}
        for name, args in _used(tree):
            first = args[0].value if args and isinstance(args[0], nodes.Const) else ""
            changes_case |= name in _CASES
            if name in _CUT_ANYWHERE or name in _CUT:
                words.add(first if name in _CUT and isinstance(first, str) else "")
            elif name in _STRIP and isinstance(first, str):
                ends |= set(first)
    return TemplateCuts(frozenset(words), frozenset(looked_for), "".join(sorted(ends)), changes_case)


def _used(tree: nodes.Template) -> Iterator[tuple[str, list[nodes.Expr]]]:
    """Names and arguments of all methods and filters, also of filters that `map` is given."""
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr):
            yield call.node.attr, call.args
    for filter in tree.find_all(nodes.Filter):
        name, args = filter.name, filter.args
        if name == "map" and args and isinstance(args[0], nodes.Const):
            name, args = str(args[0].value), args[1:]
        yield name, args
