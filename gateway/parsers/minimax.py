"""Calls as MiniMax-M2 writes them.

`<minimax:tool_call>`, then `<invoke name="f">` and `<parameter name="a">1</parameter>` for each argument, a
line each, then `</invoke>` and `</minimax:tool_call>`. Values stand bare. This file writes them as JSON.
"""

from __future__ import annotations

import re

from gateway.parsers.bare import CallTags, ParameterFormat, bare_call, parameters
from gateway.parsers.calls import Format, Mark, Schemas, Tools, attempt, either, repeated, sequence, text
from gateway.parsers.output import ParsedOutput
from gateway.parsers.source import ParsedText, Wait

MARKERS = BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_END = '<invoke name="', "</invoke>"
PARAMETER, PARAMETER_END = '<parameter name="', "</parameter>"
_TAGS = (*MARKERS, INVOKE, INVOKE_END)
_TITLE = re.compile(r'[^"<>\n]+')
_WRITTEN = ParameterFormat(
    PARAMETER + '{}">',
    f"{PARAMETER_END}\n",
    PARAMETER_END,
    (PARAMETER, INVOKE_END, INVOKE, *MARKERS),
    lines=False,
    name=_TITLE.pattern,
    over=(INVOKE_END, END),
)
_CALL = CallTags(PARAMETER, '">', INVOKE_END, _TITLE, _WRITTEN)


def read(source: ParsedText, out: ParsedOutput, tools: Tools) -> Wait[None]:
    """Reads an answer to its end. Any name may be called."""
    while marker := (yield from source.upto(_TAGS, out.content, out.cut)):
        if marker == INVOKE:
            yield from attempt(source, out, bare_call(source, out, tools, _CALL))


def grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools, and nothing else."""
    calls = [
        sequence(text(f'{INVOKE}{name}">\n'), parameters(name, schema, _WRITTEN), text(f"{INVOKE_END}\n"))
        for name, schema in tools.items()
    ]
    return sequence(mark(BEGIN), text("\n"), repeated(either(calls), None, many), mark(END))
