"""Calls as GLM-4.5 writes them.

`<tool_call>f`, then `<arg_key>a</arg_key>` and `<arg_value>1</arg_value>` for each argument, a line each
(GLM-4.7 writes no line breaks), then `</tool_call>`. Values stand bare. This file writes them as JSON.
"""

from __future__ import annotations

from gateway.parsers.bare import ParameterFormat, bare, parameters
from gateway.parsers.calls import (
    NAME,
    Format,
    Mark,
    Schemas,
    Tools,
    attempt,
    begin,
    either,
    quoted,
    repeated,
    sequence,
    text,
)
from gateway.parsers.hermes import BEGIN, END
from gateway.parsers.output import ParsedOutput
from gateway.parsers.parameters import ParameterKinds, kinds_of
from gateway.parsers.source import CutShort, ParsedText, Wait

MARKERS = (BEGIN, END)
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_WRITTEN = ParameterFormat(
    f"{KEY}{{}}{KEY_END}\n{VALUE}",
    f"{VALUE_END}\n",
    VALUE_END,
    (KEY, *MARKERS),
    lines=False,
    name=r"[^<\s]([^<]*[^<\s])?",
    over=(END,),
)


def read(source: ParsedText, out: ParsedOutput, tools: Tools) -> Wait[None]:
    """Reads an answer to its end. Any name may be called."""
    while marker := (yield from source.upto(MARKERS, out.content, out.cut)):
        if marker == BEGIN:
            yield from attempt(source, out, _call(source, out, tools))


def _call(source: ParsedText, out: ParsedOutput, tools: Tools) -> Wait[None]:
    yield from source.space()
    name = yield from source.run(NAME)
    yield from source.space()
    if not (yield from source.accept(KEY)):
        yield from source.expect(END)
        begin(source, out, name)
        out.done()
        return
    begin(source, out, name)
    yield from _arguments(source, out, kinds_of(tools.get(name, {})))
    out.done()


def _arguments(source: ParsedText, out: ParsedOutput, kinds: ParameterKinds) -> Wait[None]:
    """Reads arguments from behind the first tag of a name, and the end of the call."""
    separator = "{"
    while True:
        parts: list[str] = []
        if not (tag := (yield from source.upto((KEY_END, VALUE), parts.append))):
            raise CutShort
        title = "".join(parts).strip()
        if tag == KEY_END:  # which the model may leave out
            yield from source.space()
            if not (yield from source.accept(VALUE)):
                break
        out.arguments(f"{separator}{quoted(title)}: ")
        separator = ", "
        yield from bare(source, out.arguments, _WRITTEN, kinds.of(title))
        yield from source.space()
        if not (yield from source.accept(KEY)):
            break
    if not (yield from source.accept(END)) and source.ends_within(KEY, VALUE, END):
        raise CutShort
    out.arguments("{}" if separator == "{" else "}")


def grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools, and nothing else."""
    calls = [
        sequence(mark(BEGIN), text(f"{name}\n"), parameters(name, schema, _WRITTEN), mark(END))
        for name, schema in tools.items()
    ]
    return repeated(either(calls), text("\n"), many)
