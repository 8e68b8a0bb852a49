"""Calls as Kimi-K2 writes them, between markers of their own.

Within a section each call has an id, `functions.NAME:N`, which counts the chat's calls from 0, and an object
of arguments. This file takes the name out of the id.
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
from gateway.parsers.source import ParsedText, Wait

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKERS = (SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END)
_SPACE_NAME = "functions."
_NUMBER = re.compile(r":\d+$")


def read(source: ParsedText, out: ParsedOutput, tools: Tools) -> Wait[None]:
    """Reads an answer to its end. Any name may be called."""
    while marker := (yield from source.upto(MARKERS, out.content, out.cut)):
        if marker == CALL:
            yield from attempt(source, out, _call(source, out))


def _call(source: ParsedText, out: ParsedOutput) -> Wait[None]:
    yield from source.space()
    id = yield from source.run(NAME)
    yield from source.space()
    # The model may forget the marker.
    if not (yield from source.skip(ARGUMENTS)) and (yield from source.peek()) != "{":
        yield from source.expect(ARGUMENTS)
    yield from source.space()
    name = _NUMBER.sub("", id.removeprefix(_SPACE_NAME))
    yield from call_by_name(source, out, name, MARKERS)


def grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools, and nothing else."""
    number: Format = {"type": "regex", "pattern": "0|[1-9][0-9]{0,3}"}
    calls = [
        sequence(
            *(mark(CALL), text(f"{_SPACE_NAME}{name}:"), number),
            *(mark(ARGUMENTS), arguments(schema), mark(CALL_END)),
        )
        for name, schema in tools.items()
    ]
    return sequence(mark(SECTION), repeated(either(calls), None, many), mark(SECTION_END))
