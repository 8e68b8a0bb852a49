"""Calls as Llama 3 writes them: `{"name": ..., "parameters": {...}}` is the whole answer, or follows
`<|python_tag|>`; several are separated by semicolons.

An object that opens an answer is only a call if it names one of the tools. This file refuses to know what
else the tools are.
"""

from __future__ import annotations

from gateway.parsers.calls import Tools, attempt, call_object
from gateway.parsers.output import Output
from gateway.parsers.source import Source, Wait
from gateway.parsers.tags import Format, Mark, Schemas, call_objects, repeated, text

TAG = "<|python_tag|>"
MARKERS = (TAG,)


def read(source: Source, out: Output, tools: Tools) -> Wait[None]:
    """Reads an answer to its end."""
    out.content((yield from source.space()))
    if (yield from source.peek()) == "{":
        yield from _calls(source, out, tools)
    while (yield from source.upto(MARKERS, out.content)):
        yield from source.space()
        yield from _calls(source, out, None)


def _calls(source: Source, out: Output, known: Tools | None) -> Wait[None]:
    """Reads calls for as long as one follows another."""
    while (yield from attempt(source, out, call_object(source, out, known))):
        yield from source.space()
        if not (yield from source.accept(";")):
            return
        yield from source.space()


def grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools, and nothing else."""
    return repeated(call_objects(tools, "parameters"), text("; "), many)
