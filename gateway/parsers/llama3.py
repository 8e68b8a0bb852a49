"""Calls as Llama 3 writes them: `{"name": ..., "parameters": {...}}` on lines of their own or separated by
semicolons, alone or behind `<|python_tag|>`. Llama 3.2 also writes `[f(a=1)]`, Llama 4 other markers.

What begins a line is only a call if it names one of the tools. This file refuses to know what else they are.
"""

from __future__ import annotations

from gateway.parsers.calls import Tools, attempt, call_object, listed
from gateway.parsers.output import Output
from gateway.parsers.pythonic import BEGIN, END, call
from gateway.parsers.source import Source, Wait
from gateway.parsers.tags import Format, Mark, Schemas, call_objects, repeated, text

TAG = "<|python_tag|>"
MARKERS = (TAG, BEGIN, END)
_LINE = "\n"


def read(source: Source, out: Output, tools: Tools) -> Wait[None]:
    """Reads an answer to its end."""
    out.content((yield from source.space()))
    yield from _calls(source, out, tools)
    while marker := (yield from source.upto((*MARKERS, _LINE), out.content)):
        space = yield from source.space()
        if marker == _LINE:
            out.content(_LINE + space)
        yield from _calls(source, out, tools if marker == _LINE else None)


def _calls(source: Source, out: Output, known: Tools | None) -> Wait[None]:
    """Reads calls for as long as one follows another."""
    while first := (yield from source.peek()):
        if first == "[":
            yield from listed(source, out, lambda before: _item(source, out, before, known))
            return
        if first != "{" or not (yield from attempt(source, out, call_object(source, out, known))):
            return
        yield from source.space()
        if (yield from source.accept(";")) or (yield from source.accept(",")):
            yield from source.space()


def _item(source: Source, out: Output, before: str, known: Tools | None) -> Wait[None]:
    yield from source.expect(before)
    yield from source.space()
    is_object = (yield from source.peek()) == "{"
    yield from (call_object if is_object else call)(source, out, known)


def grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools, and nothing else."""
    return repeated(call_objects(tools, "parameters"), text("; "), many)
