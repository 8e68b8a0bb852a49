"""Chat templates: they turn a list of messages into the prompt text that the model was trained on.

Templates come from the model's folder; they run in a sandbox that bounds their steps and output. This module
knows jinja2 and what templates expect of it (as in transformers). It refuses to know tokens and files.
"""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
_STEPS = "steps so far"  # a variable whose name no template can write
_MARK = "<|the final message ends here|>"


class ChatTemplate:
    """A model's compiled template, or several by name: `tool_use` counts for chats with tools.

    `special`: values of the variables it may use, such as bos_token.
    """

    def __init__(
        self, sources: str | Mapping[str, str], special: Mapping[str, str], origin: str = "the chat template"
    ) -> None:
        """Raises ConfigError, naming `origin`, if a template does not compile, or `default` is not there."""
        self._variables = {"tools": None, "documents": None, **special}
        self._sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        if "default" not in self._sources:
            raise ConfigError(f"{origin} has no template named default", param="model")
        self._templates = {name: _compiled(source, origin) for name, source in self._sources.items()}
        trees = [_ENVIRONMENT.parse(source) for source in self._sources.values()]
        self.reads: frozenset[str] = frozenset().union(*map(find_undeclared_variables, trees))
        self.lists_parts = any(map(_lists_parts, trees))

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
    ) -> str:
        """The prompt that asks for the next assistant message, or for the rest of the last one.

        `template_kwargs`: further variables of the template. `tools`: OpenAI's objects, as the caller wrote
        them.

        Raises InvalidRequest if the template refuses the messages or fails on them.
        """
        chat = [dict(message) for message in messages]
        if continue_final_message:
            final = _final_text(chat)
            chat[-1]["content"] = f"{final}{_MARK} "
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        text = self._run(
            self._templates[name],
            {
                **self._variables,
                **(template_kwargs or {}),
                "messages": chat,
                "tools": tools or None,
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
                _STEPS: itertools.count(1),
            },
        )
        return _cut_at_mark(text, final) if continue_final_message else text

    @staticmethod
    def _run(template: Template, variables: Mapping[str, Any]) -> str:
        try:
            return template.render(variables)
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


def _field(name: nodes.Getattr | nodes.Getitem) -> Any:
    if isinstance(name, nodes.Getattr):
        return name.attr
    return name.arg.value if isinstance(name.arg, nodes.Const) else None


def _final_text(chat: Sequence[Message]) -> str:
    """The text of the last message. Raises InvalidRequest if it has none to continue."""
    final = chat[-1].get("content")
    if not isinstance(final, str):
        raise InvalidRequest("the final message has no text that could be continued", param="messages")
    return final


def _cut_at_mark(text: str, final: str) -> str:
    """The prompt up to where its final message ends, stripped where the template strips messages."""
    before, mark, after = text.rpartition(_MARK)
    if not mark or final.strip() not in before:
        raise InvalidRequest(
            "the chat template changes the final message, so it cannot be continued", param="messages"
        )
    return before if after.startswith(" ") else before.rstrip()


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that also bounds how long a template runs and how much it writes."""

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _step(context)
        return super().call(context, function, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Passes what every loop iterates over through the filter that counts iterations."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        return template

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins what a template, or a macro in it, has written. Raises TemplateError if it is too long."""
        kept, length = [], 0
        for part in parts:
            length += len(part)
            if length > MAX_LENGTH:
                raise TemplateError(f"it writes more than {MAX_LENGTH} characters")
            kept.append(part)
        return "".join(kept)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training. Here only its content matters."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return caller()


def _step(context: Context) -> None:
    if next(context.resolve(_STEPS)) > MAX_STEPS:
        raise TemplateError(f"it takes more than {MAX_STEPS} steps")


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


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters |= {"tojson": _to_json, "counted": _counted}
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


_ENVIRONMENT = _environment()
