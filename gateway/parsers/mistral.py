"""Calls as Mistral's models write them.

Up to version 3 of their tokenizer: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`. Later, for each
call: `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`, with or without the id.

Ids that the model writes are not read: the server's own are unique.
"""

from __future__ import annotations

import re

from gateway.parsers.calls import (
    NAME,
    Format,
    Mark,
    Schemas,
    Tools,
    arguments,
    attempt,
    call_by_name,
    call_objects,
    either,
    repeated,
    sequence,
    text,
)
from gateway.parsers.lists import any_calls
from gateway.parsers.output import ParsedOutput
from gateway.parsers.source import MalformedOutput, ParsedText, Wait

MARKERS = BEGIN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID = re.compile(r"\w+")


def read(source: ParsedText, out: ParsedOutput, tools: Tools) -> Wait[None]:
    """Reads an answer to its end. Any name may be called."""
    while (yield from source.upto(MARKERS, out.content, out.cut)):
        yield from source.space()
        if (yield from source.peek()) in ("[", "{"):
            yield from any_calls(source, out)
        else:
            yield from attempt(source, out, _named(source, out, tools))


def _named(source: ParsedText, out: ParsedOutput, tools: Tools) -> Wait[None]:
    """Reads one call whose name stands before its arguments. Without any, a marker or a tool tells a call."""
    name = yield from source.run(NAME)
    yield from source.space()
    if (yield from source.skip(CALL_ID)):
        yield from source.run(_ID)
        yield from source.space()
    is_marked = yield from source.skip(ARGUMENTS)
    yield from source.space()
    if not is_marked and name not in tools and (yield from source.peek()) != "{":
        raise MalformedOutput
    yield from call_by_name(source, out, name, MARKERS)


def listed_grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools in an array, and nothing else."""
    items = repeated(call_objects(tools, "arguments"), text(", "), many)
    return sequence(mark(BEGIN), text(" ["), items, text("]"))


def named_grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools, each by its name, and nothing else."""
    calls = [
        sequence(mark(BEGIN), text(name), mark(ARGUMENTS), arguments(schema))
        for name, schema in tools.items()
    ]
    return repeated(either(calls), None, many)
