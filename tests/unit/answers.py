"""Answers as models write them in each format, and a check that a parser reads them alike however cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gateway.parsers.message import MessageParser, MessageReading
from gateway.parsers.output import (
    CallArguments,
    CallDone,
    CallStarted,
    ContentText,
    Event,
    ReasoningText,
    merged,
)
from gateway.parsers.table import TOOL_FORMATS

TOOLS: dict[str, dict[str, Any]] = {
    "f": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "g": {"type": "object", "properties": {"b": {"type": "string"}}},
}
Feeds = Callable[[MessageReading, Sequence[str]], list[Event]]

TWO_CALLS = {
    "llama3_json": '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {"b": "x"}}',
    "pythonic": '[f(a=1), g(b="x")]',
    "hermes": (
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"b": "x"}}\n</tool_call>'
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=g>\n<parameter=b>\nx\n</parameter>\n</function>\n</tool_call>"
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=f>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=g>\n<parameter=b>x</parameter>\n</function>\n</seed:tool_call>"
    ),
    "glm45": (
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
        "<tool_call>g\n<arg_key>b</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"
    ),
    "glm45 4.7": (
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
        "<tool_call>g<arg_key>b</arg_key><arg_value>x</arg_value></tool_call>"
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
        '<invoke name="g">\n<parameter name="b">x</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "gemma4": '<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:g{b:<|"|>x<|"|>}<tool_call|>',
    "functionary": '<function=f>{"a": 1}</function><function=g>{"b": "x"}</function>',
    "command_r": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n'
        '    {"tool_call_id": "1", "tool_name": "g", "parameters": {"b": "x"}}\n]<|END_ACTION|>'
    ),
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "x"}}]',
    "hunyuan": (
        '<tool_calls>[{"name": "f", "arguments": {"a": 1}}, '
        '{"name": "g", "arguments": {"b": "x"}}]</tool_calls>'
    ),
    "nemotron": (
        '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "x"}}]</TOOLCALL>'
    ),
    "olmo3": "<function_calls>\nf(a=1)\ng(b='x')\n</function_calls>",
    "lfm2": "<|tool_call_start|>[f(a=1), g(b='x')]<|tool_call_end|>",
    "lfm2 json": (
        '<|tool_call_start|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "x"}}]'
        "<|tool_call_end|>"
    ),
    "phi4_mini": 'functools[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "x"}}]',
    "hermes granite": (
        '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "x"}}]'
        "</tool_call>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>'
        '{"b": "x"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "gpt_oss": (
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"a": 1}<|call|><|start|>assistant to=functions.g<|channel|>commentary json<|message|>'
        '{"b": "x"}<|call|>'
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abc123XYZ"}, '
        '{"name": "g", "arguments": {"b": "x"}}]'
    ),
    "mistral 11": '[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]q[ARGS]{"b": "x"}',
    "mistral 13": '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"b": "x"}',
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n'
        '{"b": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseek_v3 1": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>g<｜tool▁sep｜>{"b": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
}


def reading(name: str, **more: Any) -> MessageReading:
    """How answers of this format are read; a name's second word tells versions apart."""
    return MessageReading(TOOL_FORMATS[name.split()[0]], TOOLS, **more)


def fed(how: MessageReading, pieces: Iterable[str]) -> list[Event]:
    """All that a parser finds in these pieces."""
    parser = MessageParser(how)
    found = [event for piece in pieces for event in parser.feed(piece)]
    return merged([*found, *parser.end()])


def calls(*named: tuple[str, str]) -> list[Event]:
    """The events of these calls: names and arguments."""
    return [
        event
        for i, (name, arguments) in enumerate(named)
        for event in (CallStarted(i, name), CallArguments(i, arguments), CallDone(i))
    ]


def told(text: str) -> list[Event]:
    """The events of content."""
    return [ContentText(text)] if text else []


def thought(text: str) -> list[Event]:
    """The events of reasoning."""
    return [ReasoningText(text)] if text else []


def cuts(text: str, rng: random.Random, most: int = 400) -> list[list[str]]:
    """The text cut after every character, in two at each place (of a long one, at some), and at random in
    pieces of 1 to 4.
    """
    places = sorted(rng.sample(range(len(text) + 1), min(len(text) + 1, most)))
    halves = [[text[:i], text[i:]] for i in places]
    pieces, at = [], 0
    while at < len(text):
        end = at + rng.randint(1, 4)
        pieces.append(text[at:end])
        at = end
    return [list(text), *halves, pieces]


def check_cuts(
    how: MessageReading, text: str, rng: random.Random, feeds: Feeds = fed, most: int = 400
) -> list[Event]:
    """The events of the whole text, which must be those of every way to cut it."""
    whole = feeds(how, [text])
    for pieces in cuts(text, rng, most):
        assert feeds(how, pieces) == whole, pieces
    return whole
