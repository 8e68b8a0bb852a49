"""Values of parameters that stand bare between tags, read as JSON.

A value ends at its tag, where what may stand behind a value follows. A tag within a JSON value's strings is
theirs. This file refuses to know which tags a format has, and of which kind a parameter is.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from gateway.parsers.kinds import Kind
from gateway.parsers.source import Cut, Sink, Source, Wait
from gateway.parsers.tags import quoted


class Written(NamedTuple):
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


def bare(source: Source, sink: Sink, written: Written, kind: Kind) -> Wait[None]:
    """Reads a value up to the tag that ends it, and writes it as JSON; text goes on as it comes.

    Raises Cut if the text ends before it does.
    """
    if kind is Kind.JSON and (value := (yield from _json(source, written))):
        sink(value)
        return
    if written.lines:
        yield from source.accept("\n")
    words = _Text(sink, "\n" if written.lines else "")
    if kind is Kind.TEXT:
        words.open()
        yield from _upto_end(source, words.add, written)
        words.close()
        return
    parts: list[str] = []
    yield from _upto_end(source, parts.append, written)
    value = "".join(parts).removesuffix("\n" if written.lines else "")
    stands = value == "null" if kind is Kind.OPTIONAL else _stands(value)
    sink(value if stands else quoted(value))


def _json(source: Source, written: Written) -> Wait[str]:
    """Reads an object, an array or a string, and its end. "": what comes is none, and nothing is read."""
    space = yield from source.space()
    value = yield from source.whole_json()
    if value and _stands(value):
        space += value + (yield from source.space())
        if (yield from source.accept(written.end)):
            if (yield from source.leads_to(written.follow)):
                return value
            space += written.end
    else:
        space += value
    source.back(space)
    return ""


def _upto_end(source: Source, sink: Sink, written: Written) -> Wait[None]:
    while (yield from source.upto((written.end,), sink)):
        if (yield from source.leads_to(written.follow)):
            return
        sink(written.end)
    raise Cut


def _stands(value: str) -> bool:
    """Whether it is JSON as it stands."""
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    """NaN and the infinities are Python's, not JSON's."""
    raise ValueError(constant)


class _Text:
    """Writes a JSON string piece by piece. What `ends` it is held back: it is none of the value."""

    def __init__(self, sink: Sink, ends: str) -> None:
        self._sink = sink
        self._ends = ends
        self._held = ""

    def open(self) -> None:
        self._sink('"')

    def add(self, text: str) -> None:
        text = self._held + text
        self._held = self._ends if text.endswith(self._ends) else ""
        self._sink(quoted(text[: len(text) - len(self._held)])[1:-1])

    def close(self) -> None:
        self._sink('"')
