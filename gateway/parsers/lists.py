"""Calls in a list behind a marker: of objects as Command R, Granite, Hunyuan, Nemotron and Phi-4 write them,
or of Python (LFM2; OLMo 3, a line each).

What is in a list tells how its calls are written.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.parsers import pythonic
from gateway.parsers.calls import (
    Format,
    Mark,
    Schemas,
    Tools,
    arguments,
    attempt,
    call_object,
    call_objects,
    either,
    listed,
    quoted,
    repeated,
    sequence,
    text,
)
from gateway.parsers.output import ParsedOutput
from gateway.parsers.pythonic import call
from gateway.parsers.reasoning import ReasoningTags
from gateway.parsers.source import ParsedText, Wait

COMMAND_R = "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"
COMMAND_R_REASONING = ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>")
GRANITE = "<|tool_call|>", "<|/tool_call|>"
LFM2 = "<|tool_call_start|>", "<|tool_call_end|>"
LFM2_TOOLS = "<|tool_list_start|>"  # of its first templates, which write no calls
PHI4 = ("functools[",)
HUNYUAN = "<tool_calls>", "</tool_calls>"
NEMOTRON = "<TOOLCALL>", "</TOOLCALL>"
OLMO3 = "<function_calls>", "</function_calls>"


def reader(markers: tuple[str, ...]) -> Callable[[ParsedText, ParsedOutput, Tools], Wait[None]]:
    """Returns a reader of answers whose calls stand behind the first of `markers`. Any name may be called."""

    def read(source: ParsedText, out: ParsedOutput, tools: Tools) -> Wait[None]:
        while marker := (yield from source.upto(markers, out.content, out.cut)):
            if marker != markers[0]:
                continue
            if marker.endswith("["):
                source.back("[")
            yield from source.space()
            yield from any_calls(source, out)

    return read


def read_lines(source: ParsedText, out: ParsedOutput, tools: Tools) -> Wait[None]:
    """Reads an answer to its end whose calls stand behind OLMo 3's marker. Any name may be called."""
    while marker := (yield from source.upto(OLMO3, out.content, out.cut)):
        found = marker == OLMO3[0]
        while found:
            yield from source.space()
            if (yield from source.peek()) in ("", "<"):
                break
            found = yield from attempt(source, out, call(source, out, None))


def any_calls(source: ParsedText, out: ParsedOutput, known: Tools | None = None) -> Wait[None]:
    """Reads a list of calls, objects or Python, or one object after the other."""
    while first := (yield from source.peek()):
        if first == "[":
            yield from listed(source, out, lambda before: _item(source, out, before, known))
            return
        if first != "{" or not (yield from attempt(source, out, call_object(source, out, known))):
            return
        yield from source.space()
        if (yield from source.accept(";")) or (yield from source.accept(",")):
            yield from source.space()


def _item(source: ParsedText, out: ParsedOutput, before: str, known: Tools | None) -> Wait[None]:
    yield from source.expect(before)
    yield from source.space()
    is_object = (yield from source.peek()) == "{"
    yield from (call_object if is_object else call)(source, out, known)


def command_r_grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools as Command R writes them, and nothing else."""
    number: Format = {"type": "regex", "pattern": "0|[1-9][0-9]{0,3}"}
    calls = [
        sequence(
            *(text('\n    {"tool_call_id": "'), number, text(f'", "tool_name": {quoted(name)}, ')),
            *(text('"parameters": '), arguments(schema), text("}")),
        )
        for name, schema in tools.items()
    ]
    items = repeated(either(calls), text(","), many)
    return sequence(mark(COMMAND_R[0]), text("["), items, text("\n]"), mark(COMMAND_R[1]))


def writer(markers: tuple[str, str]) -> Callable[[Schemas, Mark, bool], Format]:
    """The grammar of a list of objects between these markers, and nothing else."""

    def grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
        items = repeated(call_objects(tools, "arguments"), text(", "), many)
        return sequence(mark(markers[0]), text("["), items, text("]"), mark(markers[1]))

    return grammar


def olmo3_grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools as OLMo 3 writes them, and nothing else."""
    calls = repeated(pythonic.call_format(tools), text("\n"), many)
    return sequence(mark(OLMO3[0]), text("\n"), calls, text("\n"), mark(OLMO3[1]))


def granite_grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools as Granite writes them, and nothing else."""
    items = repeated(call_objects(tools, "arguments"), text(", "), many)
    return sequence(mark(GRANITE[0]), text("["), items, text("]"))


def phi4_grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools as Phi-4 writes them, and nothing else."""
    items = repeated(call_objects(tools, "arguments"), text(", "), many)
    return sequence(mark(PHI4[0]), items, text("]"))


def lfm2_grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools as LFM2 writes them, and nothing else."""
    return sequence(mark(LFM2[0]), pythonic.grammar(tools, mark, many), mark(LFM2[1]))
