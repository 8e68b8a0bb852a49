"""Calls as Qwen3-Coder writes them.

`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, a line each.

Values stand bare, between line breaks that are no part of them: a parameter that the tool's schema calls a
string is text, any other is JSON if it can be read as such. This file writes the arguments as JSON.
"""

from __future__ import annotations

import re

from gateway.parsers.bare_grammar import parameters
from gateway.parsers.bare_values import Written, bare
from gateway.parsers.calls import NAME, Tools, attempt, begin
from gateway.parsers.hermes import BEGIN, END
from gateway.parsers.kinds import kinds_of
from gateway.parsers.output import Output
from gateway.parsers.source import Cut, Source, Wait
from gateway.parsers.tags import Format, Mark, Schemas, either, quoted, repeated, sequence, text

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MARKERS = (BEGIN, END)
_TAGS = (*MARKERS, FUNCTION, FUNCTION_END)
_TITLE = re.compile(r"[^<>\n]+")
_FOLLOW = (PARAMETER, FUNCTION_END, FUNCTION, *MARKERS)
_WRITTEN = Written(
    PARAMETER + "{}>\n", f"\n{PARAMETER_END}\n", PARAMETER_END, _FOLLOW, lines=True, name=_TITLE.pattern
)


def read(source: Source, out: Output, tools: Tools) -> Wait[None]:
    """Reads an answer to its end. Any name may be called."""
    while marker := (yield from source.upto(_TAGS, out.content)):
        if marker == FUNCTION:
            yield from attempt(source, out, _function(source, out, tools))


def _function(source: Source, out: Output, tools: Tools) -> Wait[None]:
    name = yield from source.run(NAME)
    yield from source.expect(">")
    begin(source, out, name)
    kinds = kinds_of(tools.get(name, {}))
    separator = "{"
    while True:
        yield from source.space()
        if not (yield from source.accept(PARAMETER)):
            break
        title = yield from source.run(_TITLE)
        if not (yield from source.accept(">")):
            break
        out.arguments(f"{separator}{quoted(title)}: ")
        separator = ", "
        yield from bare(source, out.arguments, _WRITTEN, kinds.of(title))
    if not (yield from source.accept(FUNCTION_END)) and not (yield from source.peek()):
        raise Cut
    out.arguments("{}" if separator == "{" else "}")
    out.done()


def grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools, and nothing else."""
    calls = [
        sequence(
            *(mark(BEGIN), text(f"\n{FUNCTION}{name}>\n"), parameters(name, schema, _WRITTEN)),
            *(text(f"{FUNCTION_END}\n"), mark(END)),
        )
        for name, schema in tools.items()
    ]
    return repeated(either(calls), text("\n"), many)
