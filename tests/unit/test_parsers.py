"""What parsers find in answers: the same however these are cut, nothing lost, no marker shown."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable

import pytest
from answers import TOOLS, TWO_CALLS, calls, check_cuts, fed, reading, thought, told
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.parsers.message import MessageParser, MessageReading
from gateway.parsers.output import CallArguments, CallDone, CallStarted, ContentText, Event, merged
from gateway.parsers.reasoning import is_open
from gateway.parsers.table import REASONING, TOOL_FORMATS

THINK = REASONING["qwen3"]
RNG = random.Random(15)
BOTH = calls(("f", '{"a": 1}'), ("g", '{"b": "x"}'))


@pytest.mark.parametrize("format", TWO_CALLS)
def test_two_calls_are_read(format: str) -> None:
    assert check_cuts(reading(format), TWO_CALLS[format], RNG) == BOTH


@pytest.mark.parametrize("format", sorted(set(TWO_CALLS) - {"llama3_json", "pythonic", "gpt_oss"}))
def test_words_stand_before_and_after_calls(format: str) -> None:
    text = f"Let me see: 1 < 2.\n\n{TWO_CALLS[format]}\n Done. "
    assert check_cuts(reading(format), text, RNG) == [*told("Let me see: 1 < 2."), *BOTH, *told("Done. ")]


@pytest.mark.parametrize("format", sorted(set(TWO_CALLS) - {"gpt_oss"}))
def test_reasoning_comes_before_calls(format: str) -> None:
    how = reading(format, reasoning=THINK)
    found = check_cuts(how, f"<think>\nShould I?\n</think>\n\n{TWO_CALLS[format]}", RNG)
    assert found == [*thought("Should I?"), *BOTH]


@pytest.mark.parametrize("format", sorted(TWO_CALLS))
def test_of_several_calls_one_may_be_wanted(format: str) -> None:
    assert check_cuts(reading(format, most_calls=1), TWO_CALLS[format], RNG) == BOTH[:3]


ANALYSIS, START = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>"
EXAMPLES: dict[str, list[tuple[str, list[Event]]]] = {
    "hermes": [
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', BOTH[:3]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', BOTH[:3]),
        ('<tool_call>{"name": "f", "arguments": null}', calls(("f", "{}"))),
        ('<tool_call>{"name": "f"}</tool_call>', calls(("f", "{}"))),
        ('<tool_call>{"name": "x.y/z"}</tool_call>', calls(("x.y/z", "{}"))),
        ("<tool_call>hello {}</tool_call>!", told("hello {}!")),
        ('<tool_call>{"name": "f g"}</tool_call>', told('{"name": "f g"}')),
        ('<tool_call>{"name": "\\ud800"}</tool_call>', told('{"name": "\\ud800"}')),
        ('<tool_call>{"name": 5}</tool_call>', told('{"name": 5}')),
        ('<tool_call>{"name": "f", "name": "g"}</tool_call>', calls(("f", "{}"))),
        ('<tool_call>{"city": "Bonn"}</tool_call>', told('{"city": "Bonn"}')),
        ("</tool_call>so", told("so")),
        ("<tool_call>\n<tool_call>\n" + '{"name": "f"}</tool_call>', calls(("f", "{}"))),
        ('{"name": "f", "arguments": {}}', told('{"name": "f", "arguments": {}}')),
        (
            '<tool_call>{"name": "f", "arguments": {"s": "}{\\"]<tool_call>", "t": [{"": {}}]}}</tool_call>',
            calls(("f", '{"s": "}{\\"]<tool_call>", "t": [{"": {}}]}')),
        ),
        ('<tool_call>{"name": "f", "argu', [CallStarted(0, "f")]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": ',
            [CallStarted(0, "f"), CallArguments(0, '{"a": ')],
        ),
        ('<tool_call>{"name": "f', told('{"name": "f')),
        ("a <tool_", told("a <tool_")),
        ("  plain \n", told("  plain \n")),
        ("", []),
    ],
    "llama3_json": [
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', BOTH[:3]),
        ('\n{"type": "function", "name": "f", "parameters": {"a": 1}}', BOTH[:3]),
        ('{"name": "f", "parameters": {"a": 1}} and so on', [*BOTH[:3], *told("and so on")]),
        ('{"name": "Ann", "age": 3}', told('{"name": "Ann", "age": 3}')),
        ('{"name": "f", "age": 3}', calls(("f", "{}"))),
        ('{"name": "Ann"}', told('{"name": "Ann"}')),
        ('<|python_tag|>brave.call(query="x")', told('brave.call(query="x")')),
        ('See {"name": "f", "parameters": {}}', told('See {"name": "f", "parameters": {}}')),
        (' {"name": ', told(' {"name": ')),
    ],
    "pythonic": [
        ("[f()]", calls(("f", "{}"))),
        (
            "[f(a=[1, -2.5, {'k': (True, None)}], b='é')]",
            calls(("f", '{"a": [1, -2.5, {"k": [true, null]}], "b": "é"}')),
        ),
        ("[f(a=true, b=null)]", calls(("f", '{"a": true, "b": null}'))),
        ('[g(b="a ] ) \\" b")]', calls(("g", '{"b": "a ] ) \\" b"}'))),
        ("<|python_start|>[h(a=1)]<|python_end|>", calls(("h", '{"a": 1}'))),
        ("[1, 2]", told("[1, 2]")),
        ("[h(a=1)]", told("[h(a=1)]")),
        ("[f(a=open('x'))]", told("[f(a=open('x'))]")),
        ("[f(1)]", told("[f(1)]")),
        ("[f(a=1, a=2)]", calls(("f", '{"a": 2}'))),
        ('[f(from="x", user-id=[1, 2,], ü=3, )]', calls(("f", '{"from": "x", "user-id": [1, 2], "ü": 3}'))),
        ("[f(a=(1,\n 2), b={'x, y': ')'},)]", calls(("f", '{"a": [1, 2], "b": {"x, y": ")"}}'))),
        ("[f(a='it, ' \"is\")]", calls(("f", '{"a": "it, is"}'))),
        ("[f(a=)]", told("[f(a=)]")),
        ("[f(a=1,,b=2)]", told("[f(a=1,,b=2)]")),
        ("[f(a=1 b=2)]", told("[f(a=1 b=2)]")),
        ("[f(a==1)]", told("[f(a==1)]")),
        ("[f(1a=1)]", told("[f(1a=1)]")),
        ("[f(**{'a': 1})]", told("[f(**{'a': 1})]")),
        ("[f(a=1), so", [*BOTH[:3], *told(", so")]),
        ("[f(a=1", told("[f(a=1")),
        ("[f(a=" + "[" * 120 + "]" * 120 + ")]", told("[f(a=" + "[" * 120 + "]" * 120 + ")]")),
        ("[f(a=1e999)]", told("[f(a=1e999)]")),
    ],
    "qwen3_coder": [
        ("<tool_call><function=f></function></tool_call>", calls(("f", "{}"))),
        ("<function=g><parameter=b>a\n\nb\n\n</parameter></function>", calls(("g", '{"b": "a\\n\\nb\\n"}'))),
        ('<function=g><parameter=b>{"x": 1}</parameter></function>', calls(("g", '{"b": "{\\"x\\": 1}"}'))),
        ('<function=h><parameter=b>{"x": 1}</parameter></function>', calls(("h", '{"b": {"x": 1}}'))),
        ("<function=h><parameter=b>NaN</parameter></function>", calls(("h", '{"b": "NaN"}'))),
        ("<tool_call>\nno\n</tool_call>", told("\nno\n")),
        ("<function=f g>", told("f g>")),
    ],
    "seed_oss": [
        ("<seed:tool_call><function=f></function></seed:tool_call>", calls(("f", "{}"))),
        ("<function=g><parameter=b>\na\n</parameter></function>", calls(("g", '{"b": "\\na\\n"}'))),
        ("<function=h><parameter=b>{'x': 1}</parameter></function>", calls(("h", '{"b": "{\'x\': 1}"}'))),
        ("<seed:tool_call>\nno\n</seed:tool_call>", told("\nno\n")),
    ],
    "glm45": [
        ("<tool_call>f\n</tool_call>", calls(("f", "{}"))),
        ("<tool_call>f</tool_call> so", [*calls(("f", "{}")), *told("so")]),
        (
            "<tool_call>g\n<arg_key>b</arg_key>\n<arg_value>\na\n</arg_value>\n</tool_call>",
            calls(("g", '{"b": "\\na\\n"}')),
        ),
        (
            '<tool_call>h\n<arg_key>b</arg_key>\n<arg_value>{"x": 1}</arg_value>\n'
            "<arg_key>c</arg_key>\n<arg_value>red</arg_value>\n</tool_call>",
            calls(("h", '{"b": {"x": 1}, "c": "red"}')),
        ),
        ("<tool_call>f is\n</tool_call>", told("f is\n")),
        ('<tool_call>{"name": "f"}</tool_call>', told('{"name": "f"}')),
        (
            "<tool_call>g<arg_key>b</arg_key><arg_value>x",
            [CallStarted(0, "g"), CallArguments(0, '{"b": "x')],
        ),
        ("<tool_call>g<arg_key>b</arg_key>so", [*calls(("g", "{}")), *told("so")]),
    ],
    "gpt_oss": [
        (
            f"{ANALYSIS}Hm, 1 < 2.<|end|>{START}final<|message|>Yes.\n",
            [*thought("Hm, 1 < 2."), *told("Yes.\n")],
        ),
        (
            f"{ANALYSIS}Hm<|end|>{START}commentary to=functions.f <|constrain|>json<|message|>"
            '{"a": 1}<|call|>',
            [*thought("Hm"), *BOTH[:3]],
        ),
        (
            f"<|channel|>commentary<|message|>Let me see.<|end|>{START}commentary to=functions.f"
            '<|message|> {"a": 1}',
            [*told("Let me see."), *BOTH[:3]],
        ),
        (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", calls(("f", "{}"))),
        ("<|channel|>commentary to=functions.f<|message|>so<|call|>", told("so")),
        ("<|channel|>commentary to=functions.f<|message|>", calls(("f", "{}"))),
        ("<|channel|>final<|message|>a<|channel|>b<|return|>", told("ab")),
        (f"{ANALYSIS}Hm", thought("Hm")),
        ("Words alone.<|return|>", told("Words alone.")),
        ("<|channel|>fin", []),
    ],
    "kimi_k2": [
        ("<|tool_calls_section_begin|>so<|tool_calls_section_end|>", told("so")),
        (
            "<|tool_call_begin|> functions.x.y:12 <|tool_call_argument_begin|> {}<|tool_call_end|> so",
            [*calls(("x.y", "{}")), *told("so")],
        ),
        ("<|tool_call_begin|>f<|tool_call_argument_begin|>{}", calls(("f", "{}"))),
        ("<|tool_call_begin|>f:0<|tool_call_argument_begin|><|tool_call_end|>", calls(("f", "{}"))),
        ("<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>so", told("functions.f:0so")),
        ("<|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}", told("functions.:0{}")),
    ],
    "mistral": [
        ("[TOOL_CALLS]sorry", told("sorry")),
        ("[TOOL_CALLS] [so]", told("[so]")),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}', BOTH[:3]),
        ("[TOOL_CALLS]f[ARGS]", calls(("f", "{}"))),
        ("[TOOL_CALLS]f[ARGS]so", told("fso")),
        ("[TOOL_CALLS]f{}", calls(("f", "{}"))),
    ],
    "deepseek_v3": [
        ("<｜tool▁calls▁begin｜>so<｜tool▁calls▁end｜>", told("so")),
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>so", told("fso")),
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜> so", [*calls(("f", "{}")), *told("so")]),
    ],
}
ROWS = [(format, text, expected) for format, rows in EXAMPLES.items() for text, expected in rows]


@pytest.mark.parametrize(("format", "text", "expected"), ROWS)
def test_what_is_a_call_and_what_is_content(format: str, text: str, expected: list[Event]) -> None:
    assert check_cuts(reading(format), text, RNG) == expected


# --- reasoning -------------------------------------------------------------------------------------------

THOUGHTS: list[tuple[bool, str, list[Event]]] = [
    (False, "<think>\na\n\nb\n</think>\n\nc\n", [*thought("a\n\nb"), *told("c\n")]),
    (True, "a\n</think>\n\nc", [*thought("a"), *told("c")]),
    (True, "<think>\na</think>c", [*thought("a"), *told("c")]),
    (True, "a b ", thought("a b ")),
    (False, "<think>\n\n</think>\n\nc", told("c")),
    (False, "c <think>d</think>", told("c <think>d</think>")),
    (False, " \n c", told(" \n c")),
    (False, "<thin", told("<thin")),
    (True, "a</thin", thought("a</thin")),
    (True, "</think></think>", told("</think>")),
]


@pytest.mark.parametrize(("begun", "text", "expected"), THOUGHTS)
def test_what_is_reasoning(begun: bool, text: str, expected: list[Event]) -> None:
    assert check_cuts(MessageReading(reasoning=THINK, is_open=begun), text, RNG) == expected


@pytest.mark.parametrize(
    ("prompt", "continues", "expected"),
    [
        ("<user>Hi<assistant><think>\n", False, True),
        ("<user>Hi<assistant>", False, False),
        ("<user>What is <think>?<assistant>", False, False),
        ("<user>Hi<assistant><think>\n\n</think>\n\n", False, False),
        ("<user>Hi<assistant><think>\nWell", True, True),
        ("<user>Hi<assistant><think>\nWell</think>So", True, False),
        ("<user>Hi<assistant>So", True, False),
    ],
)
def test_the_prompts_end_says_whether_an_answer_begins_with_reasoning(
    prompt: str, continues: bool, expected: bool
) -> None:
    assert is_open(THINK, prompt, continues=continues) is expected


@pytest.mark.parametrize("piece", [1, 3, 100])
def test_the_length_of_the_reasoning_is_told(piece: int) -> None:
    text = "\n<think>a\n</think>\n\nc"
    parser = MessageParser(MessageReading(reasoning=THINK))
    ends = []
    for at in range(0, len(text), piece):
        parser.feed(text[at : at + piece])
        ends.append(parser.reasoning_end)
    parser.end()
    assert parser.reasoning_end == ends[-1] == len("\n<think>a\n</think>")
    assert piece == 100 or None in ends
    for plain in ("", "no", "<thin"):
        parser = MessageParser(MessageReading(reasoning=THINK))
        parser.feed(plain)
        parser.end()
        assert parser.reasoning_end == 0


def test_the_length_of_the_reasoning_in_a_channel_is_told() -> None:
    text = f"{ANALYSIS}a<|end|>{START}final<|message|>c"
    parser = MessageParser(reading("gpt_oss"))
    parser.feed(text[:30])
    assert parser.reasoning_end is None
    parser.feed(text[30:])
    assert parser.reasoning_end == len(f"{ANALYSIS}a<|end|>")
    for plain in ("no", "<|channel|>final<|message|>c"):
        parser = MessageParser(reading("gpt_oss"))
        parser.feed(plain)
        parser.end()
        assert parser.reasoning_end == 0


# --- any text, cut anywhere ------------------------------------------------------------------------------

MARKS = sorted({marker for format in TOOL_FORMATS.values() for marker in format.markers} | {*THINK[:2]})
FRAGMENTS = [
    *MARKS,
    *TWO_CALLS.values(),
    *(mark[: len(mark) // 2] for mark in MARKS),
    *(text[: len(text) * 2 // 3] for text in TWO_CALLS.values()),
    '{"name": "f", ',
    '"arguments": {"a": "\\"}{',
    "<function=g>\n<parameter=b>\n",
    "<tool_call>g\n<arg_key>b</arg_key>\n<arg_value>",
    "</arg_value>",
    "functions.f:0",
    "<|channel|>analysis<|message|>",
    "<|channel|>commentary to=functions.f<|message|>",
    "</parameter>\n</function>",
    "<function=h><parameter=b>[",
    '{"a": ["',
    "f[ARGS]",
    '[TOOL_CALLS] [{"name": "f"}, {"name": "g", "arguments": ',
    "[f(a=1), ",
    *" \n{}[](),:;=\"\\'`<>|é\U0001f642",
    "words ",
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=9).map("".join)
ANY = st.builds(
    MessageReading,
    calls=st.sampled_from([None, *TOOL_FORMATS.values()]),
    tools=st.just(TOOLS),
    most_calls=st.sampled_from([None, 1]),
    reasoning=st.sampled_from([None, THINK]),
    is_open=st.booleans(),
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ANY, TEXTS, st.randoms(use_true_random=False))
def test_no_cut_changes_what_is_found(how: MessageReading, text: str, rng: random.Random) -> None:
    found = check_cuts(how, text, rng, most=10)
    check_calls(found)
    check_markers(how, text)


def check_calls(found: list[Event]) -> None:
    """Each call begins once, in order, and is done before the next one begins."""
    open_call, count = None, 0
    for event in found:
        match event:
            case CallStarted(index=index):
                assert open_call is None and index == count
                open_call, count = index, count + 1
            case CallArguments(index=index):
                assert index == open_call
            case CallDone(index=index):
                assert index == open_call
                open_call = None


def check_markers(how: MessageReading, text: str) -> None:
    """No marker of the format is part of the content, as long as none is built of two texts beside it."""
    if how.calls is None or how.reasoning is not None:
        return
    parser = MessageParser(how)
    for event in [*parser.feed(text), *parser.end()]:
        if isinstance(event, ContentText):
            assert not any(marker in event.text for marker in how.calls.markers)


def test_a_parser_that_looks_at_pieces_alone_is_noticed() -> None:
    """The checks above see a parser that finds a marker only in one piece, and one that drops its rest."""

    def hasty(how: MessageReading, pieces: Iterable[str]) -> list[Event]:
        found = [event for piece in pieces for event in fed(how, [piece])]
        return merged(found)

    def forgetful(how: MessageReading, pieces: Iterable[str]) -> list[Event]:
        parser = MessageParser(how)
        return merged(event for piece in pieces for event in parser.feed(piece))

    for format, text in TWO_CALLS.items():
        with pytest.raises(AssertionError):
            check_cuts(reading(format), text, RNG, hasty)
    assert forgetful(reading("hermes"), ["a <tool_"]) != fed(reading("hermes"), ["a <tool_"])


# --- cost ------------------------------------------------------------------------------------------------

LONG: dict[str, tuple[str, str]] = {
    "marker beginnings": ("hermes", "<tool_cal "),
    "white space": ("hermes", "\n "),
    "arguments": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ['),
    "strings": ("llama3_json", '{"name": "f", "parameters": {"a": "'),
    "failing calls": ("hermes", '<tool_call>{"arguments": {}, "name": 1'),
    "early arguments": ("hermes", '<tool_call>{"arguments": {"a": "'),
    "messages": ("gpt_oss", "<|channel|>final<|message|>a<|end|>"),
    "headers": ("gpt_oss", "<|start|>assistant"),
    "keys": ("glm45", "<tool_call>g<arg_key>b</arg_key><arg_value>x</arg_value>"),
    "nested values": ("qwen3_coder", '<function=h><parameter=b>["</parameter><parameter=c>", '),
    "unclosed values": ("qwen3_coder", "<function=h><parameter=b>[[{</parameter>"),
    "values": ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>"),
    "ids": ("kimi_k2", "<|tool_call_begin|>functions.f"),
    "parameters": ("qwen3_coder", "<function=g><parameter=b>x</parameter>"),
    "lists": ("mistral", '[TOOL_CALLS] [{"name": "f"}, '),
    "python": ("pythonic", "[f(a=[1, "),
    "names": ("mistral", "[TOOL_CALLS]f"),
}


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("piece", [4, pytest.param(1 << 30, marks=pytest.mark.slow)])
def test_the_work_is_linear_in_the_answer(kind: str, piece: int) -> None:
    format, begin = LONG[kind]

    def seconds(length: int) -> float:
        body = (
            begin
            if kind in ("arguments", "strings", "early arguments", "python", "names", "values", "ids")
            else ""
        )
        text = (body + (begin if not body else "x, ") * length)[:length]
        pieces = [text[at : at + piece] for at in range(0, length, piece)]
        start = time.process_time()
        fed(reading(format), pieces)
        return time.process_time() - start

    short, long = (min(seconds(length) for _ in range(2)) for length in (3_000, 24_000))
    assert long < 30 * short + 0.01, f"8 times the text took {long / short:.0f} times as long"
