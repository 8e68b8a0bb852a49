"""Calls as DeepSeek-V3, R1 and V3.1 write them, between markers of their own.

V3 and R1 write `function`, a separator, the name, and the arguments in a fenced block; V3.1 writes the name,
a separator and the arguments. What follows the separator says which of the two it is.
"""

from __future__ import annotations

import re

from gateway.parsers.calls import (
    NAME,
    Format,
    Mark,
    Schemas,
    Tools,
    arguments,
    attempt,
    call_by_name,
    either,
    repeated,
    sequence,
    text,
)
from gateway.parsers.output import ParsedOutput
from gateway.parsers.source import CutShort, MalformedOutput, ParsedText, Wait

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MARKERS = (BEGIN, END, CALL, SEPARATOR, CALL_END)
FENCE = "```"
_TYPE = "function"
_LANGUAGE = re.compile(r"[a-z]+")


def read(source: ParsedText, out: ParsedOutput, tools: Tools) -> Wait[None]:
    """Reads an answer to its end. Any name may be called."""
    while marker := (yield from source.upto(MARKERS, out.content, out.cut)):
        if marker == CALL:
            yield from attempt(source, out, _call(source, out, tools))


def _call(source: ParsedText, out: ParsedOutput, tools: Tools) -> Wait[None]:
    yield from source.space()
    name = yield from source.run(NAME)
    yield from source.space()
    if not (yield from source.skip(SEPARATOR)) and name not in tools:
        yield from source.expect(SEPARATOR)
    yield from source.space()
    if (yield from source.peek()) in ("{", '"') or (yield from source.leads_to(MARKERS)):
        yield from call_by_name(source, out, name, MARKERS)
    else:
        yield from _typed(source, out, name)


def _typed(source: ParsedText, out: ParsedOutput, type: str) -> Wait[None]:
    """Reads a call behind its type: a name, and the arguments in a block."""
    name = yield from source.run(NAME)
    yield from source.space()
    if (yield from source.accept(FENCE)):
        yield from source.run(_LANGUAGE)
        yield from source.space()
        yield from call_by_name(source, out, name, (FENCE, *MARKERS))
        yield from source.space()
        yield from source.accept(FENCE)
    elif not (yield from source.peek()):
        raise CutShort
    elif type == _TYPE:
        yield from call_by_name(source, out, name, MARKERS)
    else:
        raise MalformedOutput


def fenced_grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools as V3 writes them, and nothing else."""
    calls = [
        sequence(
            *(mark(CALL), text(_TYPE), mark(SEPARATOR), text(f"{name}\n{FENCE}json\n")),
            *(arguments(schema), text(f"\n{FENCE}"), mark(CALL_END)),
        )
        for name, schema in tools.items()
    ]
    return sequence(mark(BEGIN), repeated(either(calls), text("\n"), many), mark(END))


def bare_grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools as V3.1 writes them, and nothing else."""
    calls = [
        sequence(mark(CALL), text(name), mark(SEPARATOR), arguments(schema), mark(CALL_END))
        for name, schema in tools.items()
    ]
    return sequence(mark(BEGIN), repeated(either(calls), None, many), mark(END))
