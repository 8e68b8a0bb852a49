"""Calls as Hermes and Qwen write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from gateway.parsers.calls import Format, Mark, Schemas, Tools, call_objects, repeated, sequence, text
from gateway.parsers.lists import any_calls
from gateway.parsers.output import ParsedOutput
from gateway.parsers.source import ParsedText, Wait

MARKERS = BEGIN, END = "<tool_call>", "</tool_call>"


def read(source: ParsedText, out: ParsedOutput, tools: Tools) -> Wait[None]:
    """Reads an answer to its end. Any name may be called. Granite 3.1 writes a list between the tags."""
    while marker := (yield from source.upto(MARKERS, out.content, out.cut)):
        if marker == BEGIN:
            yield from source.space()
            yield from any_calls(source, out)


def grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools, and nothing else."""
    call = sequence(mark(BEGIN), text("\n"), call_objects(tools, "arguments"), text("\n"), mark(END))
    return repeated(call, text("\n"), many)
