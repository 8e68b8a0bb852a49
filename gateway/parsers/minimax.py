"""Calls as MiniMax-M2 writes them.

`<minimax:tool_call>`, then `<invoke name="f">` and `<parameter name="a">1</parameter>` for each argument, a
line each, then `</invoke>` and `</minimax:tool_call>`. Values stand bare. This file writes them as JSON.
"""

from __future__ import annotations

import re

from gateway.parsers.bare_grammar import parameters
from gateway.parsers.bare_values import Written, bare
from gateway.parsers.calls import NAME, Tools, attempt, begin
from gateway.parsers.kinds import kinds_of
from gateway.parsers.output import Output
from gateway.parsers.source import Cut, Source, Wait
from gateway.parsers.tags import Format, Mark, Schemas, either, quoted, repeated, sequence, text

MARKERS = BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_END = '<invoke name="', "</invoke>"
PARAMETER, PARAMETER_END = '<parameter name="', "</parameter>"
_TAGS = (*MARKERS, INVOKE, INVOKE_END)
_TITLE = re.compile(r'[^"<>\n]+')
_WRITTEN = Written(
    PARAMETER + '{}">',
    f"{PARAMETER_END}\n",
    PARAMETER_END,
    (PARAMETER, INVOKE_END, INVOKE, *MARKERS),
    lines=False,
    name=_TITLE.pattern,
)


def read(source: Source, out: Output, tools: Tools) -> Wait[None]:
    """Reads an answer to its end. Any name may be called."""
    while marker := (yield from source.upto(_TAGS, out.content)):
        if marker == INVOKE:
            yield from attempt(source, out, _call(source, out, tools))


def _call(source: Source, out: Output, tools: Tools) -> Wait[None]:
    name = yield from source.run(NAME)
    yield from source.expect('">')
    begin(source, out, name)
    kinds = kinds_of(tools.get(name, {}))
    separator = "{"
    while True:
        yield from source.space()
        if not (yield from source.accept(PARAMETER)):
            break
        title = yield from source.run(_TITLE)
        if not (yield from source.accept('">')):
            break
        out.arguments(f"{separator}{quoted(title)}: ")
        separator = ", "
        yield from bare(source, out.arguments, _WRITTEN, kinds.of(title))
    if not (yield from source.accept(INVOKE_END)) and not (yield from source.peek()):
        raise Cut
    out.arguments("{}" if separator == "{" else "}")
    out.done()


def grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools, and nothing else."""
    calls = [
        sequence(text(f'{INVOKE}{name}">\n'), parameters(name, schema, _WRITTEN), text(f"{INVOKE_END}\n"))
        for name, schema in tools.items()
    ]
    return sequence(mark(BEGIN), text("\n"), repeated(either(calls), None, many), mark(END))
