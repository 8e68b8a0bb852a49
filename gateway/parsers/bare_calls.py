"""Calls whose arguments are tagged one by one, their values bare: what Qwen3-Coder and MiniMax-M2 share."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.parsers.bare_values import ParameterFormat, bare
from gateway.parsers.calls import NAME, Tools, begin
from gateway.parsers.kinds import kinds_of
from gateway.parsers.output import ParsedOutput
from gateway.parsers.source import CutShort, ParsedText, Wait
from gateway.parsers.tags import quoted


@dataclass(frozen=True)
class CallTags:
    """How such a call is tagged: `parameter` opens an argument, `close` ends a tag with a name in it, and
    `end` ends the call. `title`: the name of an argument; `written`: its value.
    """

    parameter: str
    close: str
    end: str
    title: re.Pattern[str]
    written: ParameterFormat


def bare_call(source: ParsedText, out: ParsedOutput, tools: Tools, tags: CallTags) -> Wait[None]:
    """Reads a call behind the tag that opens it. Raises Cut if the text ends within it."""
    name = yield from source.run(NAME)
    yield from source.expect(tags.close)
    begin(source, out, name)
    kinds = kinds_of(tools.get(name, {}))
    separator = "{"
    while True:
        yield from source.space()
        if not (yield from source.accept(tags.parameter)):
            break
        title = yield from source.run(tags.title)
        if not (yield from source.accept(tags.close)):
            break
        out.arguments(f"{separator}{quoted(title)}: ")
        separator = ", "
        yield from bare(source, out.arguments, tags.written, kinds.of(title))
    if not (yield from source.accept(tags.end)) and not (yield from source.peek()):
        raise CutShort
    out.arguments("{}" if separator == "{" else "}")
    out.done()
