"""Calls as Llama 3 writes them: `{"name": ..., "parameters": {...}}` on lines of their own or separated by
semicolons, alone or behind `<|python_tag|>`. Llama 3.2 also writes `[f(a=1)]`, Llama 4 other markers.

What begins a line is only a call if it names one of the tools.
"""

from __future__ import annotations

from gateway.parsers.calls import Format, Mark, Schemas, Tools, call_objects, repeated, text
from gateway.parsers.lists import any_calls
from gateway.parsers.output import ParsedOutput
from gateway.parsers.pythonic import BEGIN, END
from gateway.parsers.source import ParsedText, Wait

TAG = "<|python_tag|>"
MARKERS = (TAG, BEGIN, END)
_LINE = "\n"


def read(source: ParsedText, out: ParsedOutput, tools: Tools) -> Wait[None]:
    """Reads an answer to its end."""
    out.content((yield from source.space()))
    yield from any_calls(source, out, tools)
    while marker := (yield from source.upto((*MARKERS, _LINE), out.content, out.cut)):
        space = yield from source.space()
        if marker == _LINE:
            out.content(_LINE + space)
        yield from any_calls(source, out, tools if marker == _LINE else None)


def grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools, and nothing else."""
    return repeated(call_objects(tools, "parameters"), text("; "), many)
