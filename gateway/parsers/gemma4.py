"""Calls as Gemma 4 writes them: `<|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>`.

Keys stand bare, text between marks of its own, everything else as in JSON. This file writes the arguments as
JSON. The model bends this: text without its first mark (`{a:Bonn, Rhine<|"|>}`), marks for the quotes in a
text, Python's quotes around a word, round brackets around all arguments (`f(a=1)`) and a comma behind the
last one are read, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway.parsers.calls import (
    NAME,
    Format,
    Mark,
    Schemas,
    Tools,
    arguments,
    attempt,
    begin,
    check_object,
    either,
    quoted,
    repeated,
    sequence,
    text,
)
from gateway.parsers.output import ParsedOutput
from gateway.parsers.parameters import OTHER_NAMES, constraint, kinds_of, standing, unheld
from gateway.parsers.pythonic import in_order, literal
from gateway.parsers.reasoning import ReasoningTags
from gateway.parsers.source import CutShort, MalformedOutput, ParsedText, Sink, Wait

MARKERS = BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
REASONING = ReasoningTags("<|channel>", "<channel|>", title="thought\n")
_CALL = "call:"
_KEY = re.compile(r"[^\s:,{}\[\]\"<>]+")
# A text is over where brackets close up to the call's end, or up to a comma and what begins the next value or
# bare key, or a key between marks. Else the mark that was read is one of its quotes.
_CLOSING = r"[\s)}\]]*"
_LAST = rf"{_CLOSING}(?:{re.escape(END)}|{re.escape(BEGIN)}|\Z)"
_OTHER = rf"{_CLOSING},\s*(?:[{{}}\[\])\"]|[^\s:=,(){{}}\[\]\"<>]+\s*"
_MARKED_KEY = rf"{_CLOSING},\s*{re.escape(QUOTE)}[^\s:=,(){{}}\[\]\"<>]+{re.escape(QUOTE)}\s*[:=]"


@dataclass(frozen=True)
class _Brackets:
    """What stands around arguments, their bare keys and values, and between these; `after`: what shows that a
    text is over.
    """

    begin: str
    end: str
    key: re.Pattern[str]
    word: re.Pattern[str]
    is_next: tuple[str, ...]
    after: re.Pattern[str]

    @property
    def marked(self) -> _Brackets:
        """The same where keys stand between marks: before such a key a text is over, too."""
        return replace(self, after=re.compile(f"{self.after.pattern}|{_MARKED_KEY}"))


_WORD = re.compile(r"[^\s,{}\[\]\"<>]+")
_CURLY = _Brackets("{", "}", _KEY, _WORD, (":",), re.compile(f"{_LAST}|{_OTHER}:)"))
_SQUARE = _Brackets("[", "]", _KEY, _WORD, (), re.compile(rf"{_LAST}|\s*,|{_OTHER}:)"))
_ROUND = _Brackets(
    *("(", ")", re.compile(r"[^\s:=,(){}\[\]\"<>]+"), re.compile(r"[^\s,(){}\[\]\"<>]+"), (":", "=")),
    re.compile(f"{_LAST}|{_OTHER}[:=])"),
)
_MOST_AFTER = 80  # characters that are looked at to tell whether a text is over
_WORDS = {"None": "null", "True": "true", "False": "false"}
_MOST_DEPTH = 100
_SAYS_NOTHING = frozenset(("type", "title", "description", "default", "examples"))


def read(source: ParsedText, out: ParsedOutput, tools: Tools) -> Wait[None]:
    """Reads an answer to its end. Any name may be called."""
    while marker := (yield from source.upto(MARKERS, out.content, out.cut)):
        if marker == BEGIN:
            yield from attempt(source, out, _call(source, out))


def _call(source: ParsedText, out: ParsedOutput) -> Wait[None]:
    yield from source.space()
    yield from source.expect(_CALL)
    name = yield from source.run(NAME)
    yield from source.space()
    parts: list[str] = []
    brackets = _ROUND if (yield from source.peek()) == _ROUND.begin else _CURLY
    yield from _object(source, parts.append, 0, brackets)
    written = "".join(parts)
    check_object(written)
    begin(source, out, name)
    out.arguments(written)
    out.done()


def _object(source: ParsedText, sink: Sink, depth: int, brackets: _Brackets = _CURLY) -> Wait[None]:
    """Reads an object: bare keys, or keys as text is written."""
    yield from source.expect(brackets.begin)
    sink("{")
    separator = ""
    yield from source.space()
    while not (yield from source.accept(brackets.end)):
        if separator:
            yield from source.expect(",")
            yield from source.space()
            if (yield from source.accept(brackets.end)):
                break
        sink(separator)
        separator = ", "
        if (yield from source.peek()) in ('"', "<"):
            yield from _text(source, sink)
            around = brackets.marked
        else:
            around = brackets
            sink(quoted((yield from source.run(brackets.key))))
        yield from source.space()
        after = yield from source.peek()
        yield from source.expect(after if after in brackets.is_next else brackets.is_next[0])
        sink(": ")
        yield from _value(source, sink, depth + 1, around)
        yield from source.space()
    sink("}")


def _array(source: ParsedText, sink: Sink, depth: int) -> Wait[None]:
    yield from source.expect("[")
    sink("[")
    separator = ""
    yield from source.space()
    while not (yield from source.accept("]")):
        if separator:
            yield from source.expect(",")
        sink(separator)
        separator = ", "
        yield from _value(source, sink, depth + 1, _SQUARE)
        yield from source.space()
    sink("]")


def _value(source: ParsedText, sink: Sink, depth: int, around: _Brackets) -> Wait[None]:
    if depth > _MOST_DEPTH:
        raise MalformedOutput
    yield from source.space()
    first = yield from source.peek()
    if first == "{":
        yield from _object(source, sink, depth)
    elif first == "[":
        yield from _array(source, sink, depth)
    elif first in ('"', "<"):
        yield from _text(source, sink, around)
    else:
        yield from _bare(source, sink, around)


def _bare(source: ParsedText, sink: Sink, around: _Brackets) -> Wait[None]:
    """Reads a number or a word of JSON's or Python's, or else text without its first mark."""
    word = yield from source.run(around.word)
    gap = yield from source.space()
    if (yield from source.peek()) in (",", around.end) and (said := _as_json(word)):
        sink(said)
        return
    parts = [word, gap]
    if (marker := (yield from source.upto(MARKERS, parts.append))) != QUOTE:
        source.back(marker)
        raise MalformedOutput
    sink(quoted("".join(parts)))


def _as_json(word: str) -> str:
    """The word as JSON, where it is that or Python; "": it is neither."""
    said = _WORDS.get(word, word)
    try:
        if word.startswith("'"):
            return quoted(literal(word))
        json.loads(said)
    except (ValueError, MalformedOutput):
        return ""
    return said


def _text(source: ParsedText, sink: Sink, around: _Brackets | None = None) -> Wait[None]:
    """Reads text between its marks, or as JSON has it. `around`: what it is a value in; None: it is a key."""
    if (yield from source.peek()) == '"':
        yield from source.json(sink)
        return
    yield from source.expect(QUOTE)
    parts: list[str] = []
    markers: tuple[str, ...] = (QUOTE,)
    while marker := (yield from source.upto(markers, parts.append)):
        if marker != QUOTE:
            source.back(marker)
            raise MalformedOutput
        if around is None or (yield from source.looks(around.after, _MOST_AFTER)):
            sink(quoted("".join(parts)))
            return
        parts.append('"')
        markers = MARKERS
    raise CutShort


def grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools, and nothing else."""
    calls = [_call_format(name, schema, mark) for name, schema in tools.items()]
    return repeated(either(calls), None, many)


def _call_format(tool: str, schema: Mapping[str, Any], mark: Mark) -> Format:
    kinds = kinds_of(schema)

    def argument(title: str, value: Any) -> Format:
        if title and not _KEY.fullmatch(title):
            unheld(title, "the format of the model's calls cannot write this name")
        name: Format = text(title) if title else {"type": "regex", "pattern": OTHER_NAMES}
        said = constraint(value, schema)
        is_text = (kinds.of(title) if title else kinds.others).is_text
        words = _words(said, mark) if is_text or said.keys() <= _SAYS_NOTHING - {"type"} else None
        json = arguments({} if value is True else standing(value, schema))
        content = json if words is None else words if is_text else either([words, json])
        return sequence(name, text(":"), content)

    inside = in_order(tool, schema, argument, text(","))
    return sequence(mark(BEGIN), text(f"{_CALL}{tool}{{"), inside, text("}"), mark(END))


def _words(said: Mapping[str, Any], mark: Mark) -> Format | None:
    """Text between its marks; None: as JSON it can be held to more."""
    quote = mark(QUOTE)
    values = said.get("enum", [said["const"]] if "const" in said else None)
    if values is not None and not any(QUOTE in str(value) for value in values):
        return sequence(quote, either([text(str(value)) for value in values]), quote)
    if not set(said) <= _SAYS_NOTHING:
        return None
    free = {"type": "any_text", "excludes": [QUOTE] if quote["type"] == "const_string" else []}
    return sequence(quote, free, quote)
