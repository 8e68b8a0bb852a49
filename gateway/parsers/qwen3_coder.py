"""Calls as Qwen3-Coder writes them.

`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, a line each.

Values stand bare, between line breaks that are no part of them: a parameter that the tool's schema calls a
string is text, any other is JSON if it can be read as such. This file writes the arguments as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from gateway.parsers.calls import NAME, Tools, attempt, begin
from gateway.parsers.hermes import BEGIN, END
from gateway.parsers.output import Output
from gateway.parsers.source import Cut, Sink, Source, Wait
from gateway.parsers.tags import (
    Format,
    Mark,
    Schemas,
    arguments,
    either,
    optional,
    repeated,
    sequence,
    text,
)

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MARKERS = (BEGIN, END)
_TAGS = (*MARKERS, FUNCTION, FUNCTION_END)
_TITLE = re.compile(r"[^<>\n]+")
_PLAIN = frozenset("type properties required additionalProperties title description $schema $defs".split())
"""The keys of an object's schema whose parameters can be told one by one."""


def read(source: Source, out: Output, tools: Tools) -> Wait[None]:
    """Reads an answer to its end. Any name may be called."""
    while marker := (yield from source.upto(_TAGS, out.content)):
        if marker == FUNCTION:
            yield from attempt(source, out, _function(source, out, tools))


def _function(source: Source, out: Output, tools: Tools) -> Wait[None]:
    name = yield from source.run(NAME)
    yield from source.expect(">")
    begin(source, out, name)
    properties = tools.get(name, {}).get("properties")
    types = properties if isinstance(properties, Mapping) else {}
    separator = "{"
    while True:
        yield from source.space()
        if not (yield from source.accept(PARAMETER)):
            break
        title = yield from source.run(_TITLE)
        if not (yield from source.accept(">")):
            break
        out.arguments(f"{separator}{_quoted(title)}: ")
        separator = ", "
        yield from _value(source, out.arguments, _is_text(types.get(title)))
    if not (yield from source.accept(FUNCTION_END)) and not (yield from source.peek()):
        raise Cut
    out.arguments("{}" if separator == "{" else "}")
    out.done()


def _value(source: Source, sink: Sink, is_text: bool) -> Wait[None]:
    """Reads a parameter's value and writes it as JSON; text goes on as it comes."""
    text = _Text(sink)
    parts: list[str] = []
    yield from source.accept("\n")
    if is_text:
        text.open()
    found = yield from source.upto((PARAMETER_END,), text.add if is_text else parts.append)
    if not found:
        raise Cut
    if is_text:
        text.close()
        return
    value = "".join(parts).removesuffix("\n")
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = _quoted(value)
    sink(value)


class _Text:
    """Writes a JSON string piece by piece. A line break at the end is held back: it is none of the value."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = ""

    def open(self) -> None:
        self._sink('"')

    def add(self, text: str) -> None:
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._sink(_quoted(text[: len(text) - len(self._held)])[1:-1])

    def close(self) -> None:
        self._sink('"')


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    """NaN and the infinities are Python's, not JSON's."""
    raise ValueError(constant)


def _is_text(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools, and nothing else."""
    calls = [
        sequence(
            *(mark(BEGIN), text(f"\n{FUNCTION}{name}>\n"), *_parameters(schema)),
            *(text(f"{FUNCTION_END}\n"), mark(END)),
        )
        for name, schema in tools.items()
    ]
    return repeated(either(calls), text("\n"), many)


def _parameters(schema: Mapping[str, Any]) -> list[Format]:
    """Lines of parameters, in the order of the schema, each where it is required or not."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties or not set(schema) <= _PLAIN:
        return [arguments(schema, "qwen_xml")]
    lines = []
    for title, value in properties.items():
        words = _words(value)
        if words is None:
            line = arguments({**schema, "properties": {title: value}, "required": [title]}, "qwen_xml")
        else:
            line = sequence(text(f"{PARAMETER}{title}>\n"), words, text(f"\n{PARAMETER_END}\n"))
        lines.append(line if title in schema.get("required", ()) else optional(line))
    return lines


def _words(schema: Any) -> Format | None:
    """Text that a schema bounds, to the character. None: it is none, or line breaks beside it do not matter.

    The library's own notation lets spaces stand around a value, which the reader takes for a part of it.
    """
    if not _is_text(schema):
        return None
    if "const" in schema or "enum" in schema:
        values = [value for value in schema.get("enum", [schema.get("const")]) if isinstance(value, str)]
        return either([text(value) for value in values]) if all(values) and values else None
    if "pattern" in schema:
        return {"type": "regex", "pattern": schema["pattern"]}
    if "maxLength" in schema and "format" not in schema:
        bounds = f"{{{schema.get('minLength', 0)},{schema['maxLength']}}}"
        return {"type": "regex", "pattern": rf"[\s\S]{bounds}"}
    return None
