"""Calls as Qwen3-Coder writes them.

`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, a line each.

Values stand bare, between line breaks that are no part of them: a parameter that the tool's schema calls a
string is text, any other is JSON if it can be read as such. This file writes the arguments as JSON.
"""

from __future__ import annotations

import re

from gateway.parsers.bare import CallTags, ParameterFormat, bare_call, parameters
from gateway.parsers.calls import Format, Mark, Schemas, Tools, attempt, either, repeated, sequence, text
from gateway.parsers.hermes import BEGIN, END
from gateway.parsers.output import ParsedOutput
from gateway.parsers.source import ParsedText, Wait

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MARKERS = (BEGIN, END)
_TAGS = (*MARKERS, FUNCTION, FUNCTION_END)
_TITLE = re.compile(r"[^<>\n]+")
_FOLLOW = (PARAMETER, FUNCTION_END, FUNCTION, *MARKERS)
_WRITTEN = ParameterFormat(
    PARAMETER + "{}>\n", f"\n{PARAMETER_END}\n", PARAMETER_END, _FOLLOW, lines=True, name=_TITLE.pattern
)
_CALL = CallTags(PARAMETER, ">", FUNCTION_END, _TITLE, _WRITTEN)


def read(source: ParsedText, out: ParsedOutput, tools: Tools) -> Wait[None]:
    """Reads an answer to its end. Any name may be called."""
    while marker := (yield from source.upto(_TAGS, out.content)):
        if marker == FUNCTION:
            yield from attempt(source, out, bare_call(source, out, tools, _CALL))


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
