"""Calls as models bend them: what can be read is a call, what is none stays text, however it is cut."""

from __future__ import annotations

import random

import pytest
from answers import TWO_CALLS, calls, check_cuts, reading, thought, told

from gateway.parsers import reasoning
from gateway.parsers.calls import MAX_UNDECIDED
from gateway.parsers.message import MessageParser, MessageReading
from gateway.parsers.output import CallArguments, CallDone, CallStarted, ContentText, Event
from gateway.parsers.table import REASONING, TOOL_FORMATS

RNG = random.Random(34)
THINK = REASONING["qwen3"]
F, G = ("f", '{"a": 1}'), ("g", '{"b": "x"}')
AROUND = {
    "hermes": ("<tool_call>\n", "\n</tool_call>", "arguments"),
    "llama3_json": ("", "", "parameters"),
    "mistral": ("[TOOL_CALLS] [", "]", "arguments"),
}
"""What stands around a call that is one object, and its key for arguments."""
BEHIND = {
    "mistral_v11": ("[TOOL_CALLS]f[ARGS]", ""),
    "kimi_k2": ("<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "gpt_oss": ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "<|call|>"),
    "deepseek_v3": ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n", "\n```<｜tool▁call▁end｜>"),
    "deepseek_v3_1": ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
}
"""What stands around the arguments of a call whose name comes before."""


@pytest.mark.parametrize("format", AROUND)
@pytest.mark.parametrize(
    "call",
    [
        '{"name": "f", "reason": "x", "KEY": {"a": 1}}',
        '{"KEY": {"a": 1}, "name": "f"}',
        '{"why": {"name": "g", "KEY": {}}, "KEY": {"a": 1}, "n": [1, "}"], "name": "f", "id": null}',
        '{"name": "f", "KEY": {"a": 1}, "KEY": {"a": 2}, "name": "g"}',
        '{"type": "function", "name": "f", "KEY": "{\\"a\\": 1}"}',
        '{"name": "f", "KEY": {"a": 1}}}',
        '{"name": "f", "KEY": {"a": 1}}}}\n',
        '{"name" : "f" , "KEY" :\n{"a": 1} }',
    ],
)
def test_keys_come_in_any_order_and_others_are_skipped(format: str, call: str) -> None:
    before, after, key = AROUND[format]
    text = before + call.replace("KEY", key) + after
    assert check_cuts(reading(format), text, RNG) == calls(F)


@pytest.mark.parametrize("format", AROUND)
@pytest.mark.parametrize(
    "arguments",
    [
        "5",
        "[1]",
        "x",
        '{"a":1',
        '"x"',
        '"5"',
        '"[1]"',
        '"{\\"a\\":1"',
        "true",
        "{'a': 1}",
        '{"a": x}',
        '{"a" 1}',
    ],
)
def test_arguments_that_are_no_object_are_text(format: str, arguments: str) -> None:
    before, after, key = AROUND[format]
    call = (
        f'{{"name": "f", "{key}": {arguments}}}'
        if arguments != '{"a":1'
        else f'{{"name": "f", "{key}": {{"a":1]'
    )
    found = check_cuts(reading(format), f"{before}{call}{after}", RNG)
    assert all(isinstance(event, ContentText) for event in found)
    assert call in "".join(event.text for event in found if isinstance(event, ContentText))


@pytest.mark.parametrize("format", BEHIND)
@pytest.mark.parametrize("arguments", ["5", "[1]", "so", '"x"', '{"a":1]', '{"a": x}'])
def test_arguments_behind_a_name_that_are_no_object_are_text(format: str, arguments: str) -> None:
    before, after = BEHIND[format]
    found = check_cuts(reading(format), f"{before}{arguments}{after}", RNG)
    assert all(isinstance(event, ContentText) for event in found)
    assert arguments in "".join(event.text for event in found if isinstance(event, ContentText))


@pytest.mark.parametrize("format", BEHIND)
def test_a_call_without_arguments_has_an_empty_object(format: str) -> None:
    before, after = BEHIND[format]
    for space in ("", "\n", " "):
        assert check_cuts(reading(format), before + space + after, RNG) == calls(("f", "{}"))
    second = "<|start|>assistant" if format == "gpt_oss" else ""
    text = before + after + second + before + '{"a": 1}' + after
    assert check_cuts(reading(format), text, RNG) == calls(("f", "{}"), F)


@pytest.mark.parametrize("format", BEHIND)
def test_arguments_behind_a_name_may_be_the_text_of_an_object(format: str) -> None:
    before, after = BEHIND[format]
    assert check_cuts(reading(format), before + r'"{\"a\": 1}"' + after, RNG) == calls(F)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("mistral_v11", '[TOOL_CALLS] f [CALL_ID]abc [ARGS] {"a": 1}'),
        ("deepseek_v3_1", '<｜tool▁call▁begin｜>f\n<｜tool▁sep｜>\n{"a": 1}<｜tool▁call▁end｜>'),
    ],
)
def test_white_space_around_a_marker_loses_no_arguments(format: str, text: str) -> None:
    assert check_cuts(reading(format), text, RNG) == calls(F)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("mistral_v11", "[TOOL_CALLS]f"),
        ("mistral_v11", "[TOOL_CALLS]f[CALL_ID]abc[ARGS]"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f<｜tool▁call▁end｜>"),
        ("deepseek_v3_1", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>"),
        ("gpt_oss", "<|channel|>commentary to=functions.f<|message|>"),
    ],
)
def test_a_name_alone_between_markers_is_a_call(format: str, text: str) -> None:
    assert check_cuts(reading(format), text, RNG) == calls(("f", "{}"))


@pytest.mark.parametrize("format", [*AROUND, *BEHIND])
def test_line_breaks_in_arguments_are_escaped_and_brackets_too_many_dropped(format: str) -> None:
    raw = '{"a": "one\ntwo\t\\"three\\\nfour", "b": {"k\n": ["\r"]}}'
    clean = '{"a": "one\\ntwo\\t\\"three\\nfour", "b": {"k\\n": ["\\r"]}}'
    if format in AROUND:
        before, after, key = AROUND[format]
        text = f'{before}{{"name": "f", "{key}": {raw}}}}}{after}'
    else:
        before, after = BEHIND[format]
        text = f"{before}{raw}}}{after}"
    assert check_cuts(reading(format), text, RNG) == calls(("f", clean))


@pytest.mark.parametrize("piece", [1, 50, 1 << 20])
def test_long_arguments_are_given_out_as_they_come(piece: int) -> None:
    """A short call is looked at first, a long one begins before it ends."""
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 3 * MAX_UNDECIDED
    parser = MessageParser(reading("hermes"))
    found = [event for at in range(0, len(text), piece) for event in parser.feed(text[at : at + piece])]
    assert found[0] == CallStarted(0, "f")
    told_of = "".join(event.text for event in found if isinstance(event, CallArguments))
    assert text.endswith(told_of) and len(told_of) > 2 * MAX_UNDECIDED
    assert [*parser.feed('"}}</tool_call>'), *parser.end()][-1] == CallDone(0)
    short = MessageParser(reading("hermes"))
    assert short.feed('<tool_call>{"name": "f", "arguments": {"a": "x') == []


def test_a_long_object_that_names_no_tool_is_not_held_back() -> None:
    parser = MessageParser(reading("llama3_json"))
    assert parser.feed('{"cities": ["' + "x" * 3 * MAX_UNDECIDED) != []


# --- reasoning without an end ----------------------------------------------------------------------------


@pytest.mark.parametrize("format", sorted(set(TWO_CALLS) - {"gpt_oss"}))
@pytest.mark.parametrize("is_open", [False, True])
def test_a_call_in_reasoning_that_never_ends_is_a_call(format: str, is_open: bool) -> None:
    how = reading(format, reasoning=THINK, is_open=is_open)
    text = ("" if is_open else "<think>\n") + "Should I?\n\n" + TWO_CALLS[format]
    assert check_cuts(how, text, RNG) == [*thought("Should I?"), *calls(F, G)]
    ended = check_cuts(how, text + "\n</think>\nNo.", RNG)
    assert ended == [*thought("Should I?\n\n" + TWO_CALLS[format]), *told("No.")]


def test_reasoning_that_never_ends_and_calls_nothing_stays_reasoning() -> None:
    how = reading("hermes", reasoning=THINK)
    text = "<think>Say <tool_call>so</tool_call> or"
    assert check_cuts(how, text, RNG) == thought("Say so or")
    parser = MessageParser(how)
    parser.feed(text)
    parser.end()
    assert parser.reasoning_end == len(text)
    parser = MessageParser(how)
    parser.feed("<think>So\n" + TWO_CALLS["hermes"])
    parser.end()
    assert parser.reasoning_end == len("<think>So\n")


def test_a_call_in_an_analysis_that_never_ends_is_a_call() -> None:
    analysis = "<|channel|>analysis<|message|>Hm"
    call = '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>'
    assert check_cuts(reading("gpt_oss"), analysis + call, RNG) == [*thought("Hm"), *calls(F)]
    final = f"{analysis}<|channel|>final<|message|>Yes."
    assert check_cuts(reading("gpt_oss"), final, RNG) == [*thought("Hm"), *told("Yes.")]
    assert check_cuts(reading("gpt_oss"), f"{analysis}<|channel|>or", RNG) == thought("Hmor")


@pytest.mark.parametrize("aborted", ["commentary to=assistant<|channel|>commentary?", "commentary", "??"])
def test_a_header_that_ends_without_a_message_hides_no_analysis(aborted: str) -> None:
    text = f"<|channel|>{aborted}<|end|><|start|>assistant<|channel|>analysis<|message|>Hm<|end|>"
    found = check_cuts(reading("gpt_oss"), f"{text}<|start|>assistant<|channel|>final<|message|>Yes.", RNG)
    assert found == [*thought("Hm"), *told("Yes.")]


@pytest.mark.parametrize(
    ("end", "is_open"),
    [("<|channel>", True), ("<|channel>thought\n", True), ("<|channel>thought\n<channel|>", False)],
)
def test_a_prompt_may_open_a_channel_with_its_title(end: str, is_open: bool) -> None:
    """As Gemma 4's does behind results of calls."""
    assert reasoning.is_open(REASONING["gemma4"], f"<tool_response|>{end}") is is_open
    assert not reasoning.is_open(REASONING["gemma4"], f"{end}No.")


def test_a_prompt_without_a_budget_opens_seeds_reasoning() -> None:
    tags, prompt = REASONING["seed_oss"], "<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>"
    assert reasoning.is_open(tags, prompt) and reasoning.is_open(tags, "<seed:think>\n")
    how = reading("seed_oss", reasoning=tags, is_open=True)
    text = "It is 0.</seed:cot_budget_reflect>\n</seed:think>Rain."
    assert check_cuts(how, text, RNG) == [*thought("It is 0.</seed:cot_budget_reflect>"), *told("Rain.")]


@pytest.mark.parametrize("is_open", [False, True])
def test_the_title_of_a_channel_is_no_reasoning(is_open: bool) -> None:
    how = reading("gemma4", reasoning=REASONING["gemma4"], is_open=is_open)
    begin = "" if is_open else "<|channel>"
    text = f"{begin}thought\nShould I?\n<channel|>{TWO_CALLS['gemma4']}"
    assert check_cuts(how, text, RNG) == [*thought("Should I?"), *calls(F, G)]
    assert how.markers[-2:] == ("<|channel>", "<channel|>")


# --- what stands between marks ---------------------------------------------------------------------------

Q, HEADER = '<|"|>', "<|channel|>commentary to="
INVOKE, FUNCTION = '<minimax:tool_call>\n<invoke name="', "<tool_call>\n<function="
BENT: list[tuple[str, str, list[Event]]] = [
    ("gemma4", f"<|tool_call>call:g{{b:Bonn, Rhine{Q}}}<tool_call|>", calls(("g", '{"b": "Bonn, Rhine"}'))),
    (
        "gemma4",
        f"<|tool_call>call:h{{b:5 a: {{}}{Q},c:5}}<tool_call|>",
        calls(("h", '{"b": "5 a: {}", "c": 5}')),
    ),
    ("gemma4", f"<|tool_call>call:f(a=1)<tool_call|><|tool_call>call:g(b:{Q}x{Q})<tool_call|>", calls(F, G)),
    ("gemma4", f"<|tool_call>call:h(b={{c:[(]{Q}]}})<tool_call|>", calls(("h", '{"b": {"c": ["(]"]}}'))),
    ("gemma4", f"<|tool_call>call:g{{b:{Q}x{Q},}}<tool_call|>", calls(G)),
    (
        "gemma4",
        f"<|tool_call>call:g{{b:x}}<tool_call|>{TWO_CALLS['gemma4']}",
        [*told("call:g{b:x}"), *calls(F, G)],
    ),
    (
        "gemma4",
        f"<|tool_call>call:h{{b:{Q}d({Q}{Q}{Q}[x{Q}, y{Q}]{Q}{Q}).z{Q},c:[{Q}v{Q},{Q}w{Q}]}}<tool_call|>",
        calls(("h", r'{"b": "d(\"\"\"[x\", y\"]\"\").z", "c": ["v", "w"]}')),
    ),
    ("gemma4", f"<|tool_call>call:g(b={Q}f({Q}x{Q}){Q}, c=1)", calls(("g", r'{"b": "f(\"x\")", "c": 1}'))),
    (
        "gemma4",
        f"<|tool_call>call:h{{{Q}b{Q}:{Q}x{Q},{Q}c{Q}:{Q}y{Q}}}<tool_call|>",
        calls(("h", '{"b": "x", "c": "y"}')),
    ),
    ("gemma4", "<|tool_call>call:h{b:['x', 'y']}<tool_call|>", calls(("h", '{"b": ["x", "y"]}'))),
    (
        "gemma4",
        f"<|tool_call>call:g{{b:{Q}x{Q}y}}<tool_call|>{TWO_CALLS['gemma4']}",
        [*told("call:g{b: x y}"), *calls(F, G)],
    ),
    ("gemma4", "<|tool_call>call:f(a=1}<tool_call|>.", told("call:f(a=1}.")),
    ("gemma4", "<|tool_call>call:f{a::1}<tool_call|>", told("call:f{a::1}")),
    (
        "gemma4",
        f"<|tool_call>call:g{{b:x{TWO_CALLS['gemma4']}",
        [*told("call:g{b:x"), *calls(F, G)],
    ),
    ("glm45", "<tool_call>f<arg_key>a<arg_value>1</arg_value></tool_call>", calls(F)),
    ("gpt_oss", f'{HEADER}f <|constrain|>json<|message|>{{"a": 1}}<|call|>', calls(F)),
    ("gpt_oss", f"{HEADER}python code<|message|>1<|call|>", told("1")),
    ("glm45", "<tool_call>g\n<arg_key>b</arg_key>\n<arg_value>x</tool_call>", calls(G)),
    ("minimax_m2", f'{INVOKE}f">\n<parameter name="a">1</invoke>\n</minimax:tool_call>', calls(F)),
    ("qwen3_coder", f"{FUNCTION}g>\n<parameter=b>\nx\n</function>\n</tool_call>\n", calls(G)),
    ("qwen3_coder", f"{FUNCTION}g>\n<parameter=b>\nx\n</tool_call>", calls(G)),
    ("qwen3_coder", f"{FUNCTION}f\n<parameter=a\n1\n</parameter>\n</function>\n</tool_call>", calls(F)),
    (
        "qwen3_coder",
        f"{FUNCTION}f>\n<parameter=a>\n1\n<parameter=b>\nx\n</parameter>\n</function>\n</tool_call>",
        calls(("f", '{"a": 1, "b": "x"}')),
    ),
    (
        "qwen3_coder",
        f"{FUNCTION}g>\n<parameter=b>\n</function>\n</tool_call>\n.\n</parameter>\n</function>",
        calls(("g", '{"b": "</function>\\n</tool_call>\\n."}')),
    ),
    ("kimi_k2", '<|tool_call_begin|>functions.f:0 {"a": 1}<|tool_call_end|>', calls(F)),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}', calls(F)),
]


@pytest.mark.parametrize(("format", "text", "expected"), BENT)
def test_a_mark_too_few_makes_no_call_text(format: str, text: str, expected: list[Event]) -> None:
    """As Gemma 4, GLM-4.7, gpt-oss and Qwen3-Coder leave them out. A tag in text is text if more follows."""
    assert check_cuts(reading(format), text, RNG) == expected


# --- Llama 3 ---------------------------------------------------------------------------------------------

FL, GL = '{"name": "f", "parameters": {"a": 1}}', '{"name": "g", "parameters": {"b": "x"}}'
LINES: list[tuple[str, list[Event]]] = [
    (f"{FL}\n{GL}", calls(F, G)),
    (f"{FL}{GL}", calls(F, G)),
    (f"{FL}, {GL}", calls(F, G)),
    (f"{FL};\n{GL};", calls(F, G)),
    (f"{FL}}}\n{GL}}}", calls(F, G)),
    (f"I look it up.\n{FL}\n\n  {GL}\n", [*told("I look it up."), *calls(F, G)]),
    (f"<|python_tag|>{FL}\n{GL}", calls(F, G)),
    (f"<|python_start|>Hm<|python_end|>{FL}{GL}", [*told("Hm"), *calls(F, G)]),
    (f"[{FL}, {GL}]", calls(F, G)),
    ('[f(a=1), g(b="x")]', calls(F, G)),
    ('[get_weather(city="Oslo")]', told('[get_weather(city="Oslo")]')),
    (f'{FL}\n{{"name": "Ann"}}', [*calls(F), *told('{"name": "Ann"}')]),
    ("A list:\n[1, 2]\n{3}", told("A list:\n[1, 2]\n{3}")),
    (f"so {FL}", told(f"so {FL}")),
]


@pytest.mark.parametrize(("text", "expected"), LINES)
def test_llamas_calls_stand_on_lines_of_their_own(text: str, expected: list[Event]) -> None:
    assert check_cuts(reading("llama3_json"), text, RNG) == expected


def test_llama_writes_python_too() -> None:
    how = MessageReading(TOOL_FORMATS["llama3_json"], {"get_weather": {}})
    found = check_cuts(how, '[get_weather(city="Oslo")]', RNG)
    assert found == calls(("get_weather", '{"city": "Oslo"}'))


# --- every format ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_what_is_cut_at_random_places_is_read_alike(format: str) -> None:
    """Whole answers, bent ones too, against their pieces."""
    pick = random.Random(f"cut {format}")
    own = [text for name, text in TWO_CALLS.items() if name.split()[0] == format]
    for _ in range(12):
        text = "".join(pick.choice([*own, "words\n", "}", "<think>", "</think>", *'{["\n']) for _ in range(4))
        at, size = pick.randrange(len(text) + 1), pick.randrange(4)
        bent = text[:at] + pick.choice(["", "}", "\n", '"', "5", "x"]) + text[at + size :]
        check_cuts(reading(format, reasoning=pick.choice([None, THINK])), bent, pick, most=6)
