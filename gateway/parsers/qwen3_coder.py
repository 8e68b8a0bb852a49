"""Calls as Qwen3-Coder writes them, and Seed-OSS, whose markers are others.

`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, a line each.

Values stand bare, in Qwen3-Coder's between line breaks that are no part of them: a parameter that the tool's
schema calls a string is text, any other is JSON if it can be read as such. This file writes the arguments as
JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from gateway.parsers.bare import CallTags, ParameterFormat, bare_call, parameters
from gateway.parsers.calls import Format, Mark, Schemas, Tools, attempt, either, repeated, sequence, text
from gateway.parsers.hermes import BEGIN, END
from gateway.parsers.output import ParsedOutput
from gateway.parsers.reasoning import ReasoningTags
from gateway.parsers.source import ParsedText, Wait

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MARKERS = (BEGIN, END)
SEED = "<seed:tool_call>", "</seed:tool_call>"
SEED_REASONING = ReasoningTags("<seed:think>", "</seed:think>", title="<seed:cot_budget_reflect>")
"""Its title: a prompt without a budget for reasoning opens both."""

_TITLE = re.compile(r"[^<>\n]+")


def _tags(markers: tuple[str, str], around: str) -> CallTags:
    """The tags of calls between markers; `around`: what stands around a value."""
    written = ParameterFormat(
        *(PARAMETER + "{}>" + around, f"{around}{PARAMETER_END}\n", PARAMETER_END),
        follow=(PARAMETER, FUNCTION_END, FUNCTION, *markers),
        lines=bool(around),
        name=_TITLE.pattern,
        over=(FUNCTION_END, markers[1]),
    )
    return CallTags(PARAMETER, ">", FUNCTION_END, _TITLE, written)


_TAGS = {MARKERS: _tags(MARKERS, "\n"), SEED: _tags(SEED, "")}


def reader(markers: tuple[str, str]) -> Callable[[ParsedText, ParsedOutput, Tools], Wait[None]]:
    """The reader of an answer to its end, by the markers of its calls. Any name may be called."""

    def read(source: ParsedText, out: ParsedOutput, tools: Tools) -> Wait[None]:
        while marker := (yield from source.upto((*markers, FUNCTION, FUNCTION_END), out.content, out.cut)):
            if marker == FUNCTION:
                yield from attempt(source, out, bare_call(source, out, tools, _TAGS[markers]))

    return read


def writer(markers: tuple[str, str]) -> Callable[[Schemas, Mark, bool], Format]:
    """The grammar of calls of some tools between these markers, and nothing else."""
    begin, end = markers

    def grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
        calls = [
            sequence(
                mark(begin),
                text(f"\n{FUNCTION}{name}>\n"),
                parameters(name, schema, _TAGS[markers].written),
                text(f"{FUNCTION_END}\n"),
                mark(end),
            )
            for name, schema in tools.items()
        ]
        return repeated(either(calls), text("\n"), many)

    return grammar
