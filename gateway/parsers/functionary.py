"""Calls as Functionary writes them: `<function=f>{"a": 1}</function>`."""

from __future__ import annotations

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
from gateway.parsers.source import ParsedText, Wait

MARKERS = BEGIN, END = "<function=", "</function>"


def read(source: ParsedText, out: ParsedOutput, tools: Tools) -> Wait[None]:
    """Reads an answer to its end. Any name may be called."""
    while marker := (yield from source.upto(MARKERS, out.content, out.cut)):
        if marker == BEGIN:
            yield from attempt(source, out, _call(source, out))


def _call(source: ParsedText, out: ParsedOutput) -> Wait[None]:
    name = yield from source.run(NAME)
    yield from source.expect(">")
    yield from source.space()
    yield from call_by_name(source, out, name, (END,))


def grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools, and nothing else."""
    calls = [
        sequence(mark(BEGIN), text(f"{name}>"), arguments(schema), mark(END))
        for name, schema in tools.items()
    ]
    return repeated(either(calls), None, many)
