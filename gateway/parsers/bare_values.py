"""Values of parameters that stand bare between tags, read as JSON.

A value ends at its tag, where what may stand behind a value follows. A tag within a JSON value's strings is
theirs.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from gateway.parsers.kinds import ValueKind
from gateway.parsers.python_values import as_json, literal
from gateway.parsers.source import CutShort, MalformedOutput, ParsedText, Sink, Wait, unbroken
from gateway.parsers.tags import quoted


class ParameterFormat(NamedTuple):
    """How a format writes a parameter: what stands before (with {} for the name) and after a value, and the
    tag that ends it. `follow`: what may come behind that. `lines`: the value stands between line breaks that
    are no part of it. `name`: a regular expression of the names that it can write.
    """

    before: str
    after: str
    end: str
    follow: tuple[str, ...]
    lines: bool
    name: str


def bare(source: ParsedText, sink: Sink, written: ParameterFormat, kind: ValueKind) -> Wait[None]:
    """Reads a value up to the tag that ends it, and writes it as JSON; text goes on as it comes.

    Raises Cut if the text ends before it does.
    """
    if kind.is_json and (value := (yield from _json(source, written, kind))):
        sink(value)
        return
    if written.lines:
        yield from source.accept("\n")
    words = _StringWriter(sink, "\n" if written.lines else "")
    if kind.is_text:
        words.open()
        yield from _upto_end(source, words.add, written)
        words.close()
        return
    parts: list[str] = []
    yield from _upto_end(source, parts.append, written)
    sink(_value("".join(parts).removesuffix("\n" if written.lines else ""), kind))


def _value(text: str, kind: ValueKind) -> str:
    """Reads the text as JSON; Python's words, which templates write, are read where the schema has them."""
    if kind.is_optional:
        return "null" if text in ("null", "None") else quoted(text)
    if _stands(text, kind):
        return text
    try:
        value = literal(text)
        is_meant = kind.names(value) and not isinstance(value, str)
        return as_json(value) if is_meant else quoted(text)
    except MalformedOutput:
        return quoted(text)


def _json(source: ParsedText, written: ParameterFormat, kind: ValueKind) -> Wait[str]:
    """Reads an object, an array or a string, and its end. "": what comes is none, and nothing is read."""
    space = yield from source.space()
    raw = yield from source.whole_json()
    value = unbroken(raw)
    if value and _stands(value, kind):
        space += raw + (yield from source.space())
        if (yield from source.accept(written.end)):
            if (yield from source.leads_to(written.follow)):
                return value
            space += written.end
    else:
        space += raw
    source.back(space)
    return ""


def _upto_end(source: ParsedText, sink: Sink, written: ParameterFormat) -> Wait[None]:
    while (yield from source.upto((written.end,), sink)):
        if (yield from source.leads_to(written.follow)):
            return
        sink(written.end)
    raise CutShort


def _stands(text: str, kind: ValueKind) -> bool:
    """Whether it is JSON as it stands, and rather that than text."""
    try:
        return kind.takes(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> None:
    """NaN and the infinities are Python's, not JSON's."""
    raise ValueError(constant)


class _StringWriter:
    """Writes a JSON string piece by piece. What `ends` it is held back: it is none of the value."""

    def __init__(self, sink: Sink, ends: str) -> None:
        self._sink = sink
        self._ends = ends
        self._pending = ""

    def open(self) -> None:
        self._sink('"')

    def add(self, text: str) -> None:
        text = self._pending + text
        self._pending = self._ends if text.endswith(self._ends) else ""
        self._sink(quoted(text[: len(text) - len(self._pending)])[1:-1])

    def close(self) -> None:
        self._sink('"')
