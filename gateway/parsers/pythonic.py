"""Calls as Llama 4 and others write them: `[f(a=1), g(b="x")]`, Python with literals only.

An answer that opens with a bracket only holds calls if it names the tools. Arguments are given out call by
call, since a literal is only known at its end. Nothing but literals is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gateway.parsers.calls import NAME, Tools, begin, listed
from gateway.parsers.output import ParsedOutput
from gateway.parsers.python_values import as_json, literal
from gateway.parsers.source import CutShort, MalformedOutput, ParsedText, Wait
from gateway.parsers.tags import quoted

MARKERS = BEGIN, END = "<|python_start|>", "<|python_end|>"
MAX_CALL = 1 << 16  # characters of one call's arguments
MAX_DEPTH = 100  # brackets within brackets
TITLE = re.compile(r"[^\W\d][\w.-]*")
"""Names of arguments: Python's, its keywords too, and those with dots and dashes, which models write too."""
_PIECE = re.compile(r"[^\"'()\[\]{}\\]+")
_OPENERS, _CLOSERS = "([{", ")]}"
_SEPARATOR = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[()\[\]{},]""", re.DOTALL)
_KEYWORD = re.compile(rf"({TITLE.pattern})\s*=\s*(\S.*)", re.DOTALL)


def read(source: ParsedText, out: ParsedOutput, tools: Tools) -> Wait[None]:
    """Reads an answer to its end."""
    out.content((yield from source.space()))
    if (yield from source.peek()) == "[":
        yield from calls(source, out, tools)
    while marker := (yield from source.upto(MARKERS, out.content)):
        if marker == BEGIN:
            yield from source.space()
            yield from calls(source, out, None)


def calls(source: ParsedText, out: ParsedOutput, known: Tools | None) -> Wait[None]:
    """Reads a list of calls; whatever is none goes to the caller as content, with all that follows."""
    yield from listed(source, out, lambda before: _call(source, out, before, known))


def _call(source: ParsedText, out: ParsedOutput, before: str, known: Tools | None) -> Wait[None]:
    yield from source.expect(before)
    yield from source.space()
    yield from call(source, out, known)


def call(source: ParsedText, out: ParsedOutput, known: Tools | None) -> Wait[None]:
    """Reads one call. Raises MalformedOutput for anything else."""
    name = yield from source.run(NAME)
    if known is not None and name not in known:
        raise MalformedOutput
    yield from source.expect("(")
    arguments = _keywords((yield from _enclosed(source)))
    begin(source, out, name, known)
    out.arguments(arguments)
    out.done()


def _enclosed(source: ParsedText) -> Wait[str]:
    """Reads up to the bracket that closes the one before, and gives what stands before it."""
    parts: list[str] = []
    length, depth, quote = 0, 1, ""
    while True:
        parts.append((yield from source.run(_PIECE)))
        character = yield from source.peek()
        if not character:
            raise CutShort
        yield from source.expect(character)
        parts.append(character)
        if character == "\\" and quote:
            escaped = yield from source.peek()
            yield from source.expect(escaped)
            parts.append(escaped)
        elif character in "\"'":
            quote = "" if character == quote else quote or character
        elif not quote and character in _OPENERS:
            depth += 1
        elif not quote and character in _CLOSERS:
            depth -= 1
        length += len(parts[-1]) + len(parts[-2])
        if depth == 0:
            return "".join(parts[:-1])
        if length > MAX_CALL or depth > MAX_DEPTH:
            raise MalformedOutput


def _keywords(text: str) -> str:
    """The JSON object of Python's keyword arguments, whose names may be any. Of two of a name the later one
    counts. Raises MalformedOutput if they are anything but literals.
    """
    values = dict(map(_pair, _parts(text)))
    return "{" + ", ".join(f"{quoted(name)}: {value}" for name, value in values.items()) + "}"


def _parts(text: str) -> Iterator[str]:
    """Splits at the commas outside of brackets and strings."""
    depth = begin = 0
    for separator in _SEPARATOR.finditer(text):
        depth += (separator.group() in _OPENERS) - (separator.group() in _CLOSERS)
        if separator.group() == "," and depth == 0:
            yield text[begin : separator.start()]
            begin = separator.end()
    if rest := text[begin:].strip():
        yield rest


def _pair(part: str) -> tuple[str, str]:
    """A name, and its value as JSON."""
    keyword = _KEYWORD.fullmatch(part.strip())
    if not keyword:
        raise MalformedOutput
    return keyword[1], as_json(literal(keyword[2]))
