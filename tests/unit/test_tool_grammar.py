"""What the grammar of an answer lets through, and that parsers read it back as calls."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from answers import fed
from call_writer import Writer

from eyas.common.errors import InvalidRequest
from eyas.common.grammars import string_rules
from eyas.common.grammars.notations import Grammar, GrammarKind
from gateway.formats.tool_fields import ToolFields
from gateway.grammars.tool_grammar import answer_grammar
from gateway.parsers.message import MessageReading
from gateway.parsers.output import CallArguments, CallStarted
from gateway.parsers.reasoning import ReasoningTags
from gateway.parsers.table import REASONING, TOOL_FORMATS
from tests.chat_templates import TOOLS

CALL = '{"name": "weather", "arguments": {"city": "Bonn"}}'
NOW = '{"name": "now", "arguments": {}}'
WRITTEN = {
    "hermes": [f"<tool_call>\n{CALL}\n</tool_call>", f"<tool_call>\n{NOW}\n</tool_call>", "\n"],
    "llama3_json": [CALL.replace("arguments", "parameters"), NOW.replace("arguments", "parameters"), "; "],
    "mistral_v11": ['[TOOL_CALLS]weather[ARGS]{"city": "Bonn"}', "[TOOL_CALLS]now[ARGS]{}", ""],
    "glm45": [
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n</tool_call>",
        "<tool_call>now\n</tool_call>",
        "\n",
    ],
    "functionary": ['<function=weather>{"city": "Bonn"}</function>', "<function=now>{}</function>", ""],
    "gemma4": [
        '<|tool_call>call:weather{city:<|"|>Bonn<|"|>}<tool_call|>',
        "<|tool_call>call:now{}<tool_call|>",
        "",
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "\n",
    ],
    "seed_oss": [
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Bonn</parameter>\n</function>\n</seed:tool_call>",
        "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        "\n",
    ],
}
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
V3_1 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
MINIMAX = '<invoke name="weather">\n<parameter name="city">Bonn</parameter>\n</invoke>\n'
COMMAND_R = '\n    {{"tool_call_id": "0", "tool_name": "{}", "parameters": {}}}'
LISTED = {
    "mistral": ("[TOOL_CALLS] [", CALL, NOW, ", ", "]"),
    "granite": ("<|tool_call|>[", CALL, NOW, ", ", "]"),
    "phi4_mini": ("functools[", CALL, NOW, ", ", "]"),
    "hunyuan": ("<tool_calls>[", CALL, NOW, ", ", "]</tool_calls>"),
    "nemotron": ("<TOOLCALL>[", CALL, NOW, ", ", "]</TOOLCALL>"),
    "olmo3": ("<function_calls>\n", 'weather(city="Bonn")', "now()", "\n", "\n</function_calls>"),
    "pythonic": ("[", 'weather(city="Bonn")', "now()", ", ", "]"),
    "lfm2": ("<|tool_call_start|>[", 'weather(city="Bonn")', "now()", ", ", "]<|tool_call_end|>"),
    "minimax_m2": (
        *("<minimax:tool_call>\n", MINIMAX, '<invoke name="now">\n</invoke>\n', ""),
        "</minimax:tool_call>",
    ),
    "command_r": (
        *("<|START_ACTION|>[", COMMAND_R.format("weather", '{"city": "Bonn"}')),
        *(COMMAND_R.format("now", "{}"), ",", "\n]<|END_ACTION|>"),
    ),
}
"""What stands before calls, two of them, what between, and what after."""
ENCLOSED = {
    "kimi_k2": ("<|tool_calls_section_begin|>", KIMI, "", "<|tool_calls_section_end|>"),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", V3, "\n", "<｜tool▁calls▁end｜>"),
    "deepseek_v3_1": ("<｜tool▁calls▁begin｜>", V3_1, "", "<｜tool▁calls▁end｜>"),
}


def one(format: str) -> str:
    """A call of `weather`, as the format writes it."""
    if format in LISTED:
        before, call, _, _, after = LISTED[format]
        return before + call + after
    if format in ENCLOSED:
        begin, call, _, end = ENCLOSED[format]
        return begin + _filled(call, "weather", '{"city": "Bonn"}') + end
    return WRITTEN[format][0]


def two(format: str) -> str:
    """That, and a call of `now`."""
    if format in LISTED:
        before, first, second, between, after = LISTED[format]
        return before + first + between + second + after
    if format in ENCLOSED:
        begin, call, between, end = ENCLOSED[format]
        return (
            begin + _filled(call, "weather", '{"city": "Bonn"}') + between + _filled(call, "now", "{}") + end
        )
    first, second, between = WRITTEN[format]
    return first + between + second


def _filled(call: str, name: str, arguments: str) -> str:
    return call.replace("{}", name, 1).replace("{}", arguments, 1)


def grammar(
    format: str, asked: Grammar | None = None, reasoning: ReasoningTags | None = None, **body: Any
) -> Grammar | None:
    fields = ToolFields.model_validate({"tools": TOOLS} | body)
    reading = MessageReading(TOOL_FORMATS[format], reasoning=reasoning, is_open=body.get("is_open", False))
    return answer_grammar(fields, reading, asked, lambda name: None)


@pytest.fixture(scope="module")
def accepts() -> Callable[[Grammar | None, str], bool]:
    """Whether a text is a whole output of a grammar; None lets any text through."""
    writer = Writer()

    def judge(grammar: Grammar | None, text: str) -> bool:
        if grammar is None:
            return True
        assert grammar.kind is GrammarKind.STRUCTURAL_TAG
        return writer.accepts(grammar, text.encode())

    return judge


Judge = Callable[[Grammar | None, str], bool]
HELD = sorted(name for name, format in TOOL_FORMATS.items() if not format.frame)


@pytest.mark.parametrize("format", HELD)
def test_calls_that_are_demanded_are_all_that_there_is(format: str, accepts: Judge) -> None:
    required = grammar(format, tool_choice="required")
    assert accepts(required, one(format)) and accepts(required, two(format))
    for other in ("", "It rains.", "It rains. " + one(format), one(format) + " So", one(format)[:-1]):
        assert not accepts(required, other), other
    single = grammar(format, tool_choice="required", parallel_tool_calls=False)
    assert accepts(single, one(format)) and not accepts(single, two(format))
    named = grammar(format, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert accepts(named, one(format)) and not accepts(named, two(format))
    other_tool = grammar(format, tool_choice={"type": "function", "function": {"name": "now"}})
    assert not accepts(other_tool, one(format))


@pytest.mark.parametrize("format", HELD)
def test_what_the_grammar_lets_through_is_read_back(format: str) -> None:
    events = fed(MessageReading(TOOL_FORMATS[format], {"weather": {}, "now": {}}), [two(format)])
    names = [event.name for event in events if isinstance(event, CallStarted)]
    arguments = [json.loads(event.text) for event in events if isinstance(event, CallArguments)]
    assert names == ["weather", "now"] and arguments == [{"city": "Bonn"}, {}]


@pytest.mark.parametrize("format", HELD)
def test_arguments_follow_the_schema_unless_it_is_not_strict(format: str, accepts: Judge) -> None:
    wrong = one(format).replace("Bonn", "Bonn").replace("city", "town")
    assert not accepts(grammar(format, tool_choice="required"), wrong)
    loose = [{**tool, "function": {**tool["function"], "strict": False}} for tool in TOOLS]
    assert accepts(grammar(format, tools=loose, tool_choice="required"), wrong)


@pytest.mark.parametrize("format", HELD)
def test_a_strict_tool_may_be_called_or_not(format: str, accepts: Judge) -> None:
    assert grammar(format) is None and grammar(format, tool_choice="auto") is None
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    held = grammar(format, tools=strict)
    assert accepts(held, "It rains: 1 < 2.") and accepts(held, one(format)) and accepts(held, two(format))
    assert not accepts(held, one(format).replace("city", "town"))
    if not TOOL_FORMATS[format].opener:
        assert accepts(held, "Let me see. " + one(format))


@pytest.mark.parametrize("format", HELD)
def test_an_answer_in_a_format_or_calls(format: str, accepts: Judge) -> None:
    asked = Grammar.json_schema(
        {"type": "object", "properties": {"sky": {"type": "string"}}, "required": ["sky"]}
    )
    held = grammar(format, asked)
    assert accepts(held, '{"sky": "clear"}') and accepts(held, one(format))
    assert not accepts(held, "It rains.")
    assert not accepts(grammar(format, asked, tool_choice="required"), '{"sky": "clear"}')


def test_reasoning_comes_before_what_is_held(accepts: Judge) -> None:
    tags, call = REASONING["qwen3"], one("hermes")
    held = grammar("hermes", reasoning=tags, tool_choice="required")
    assert accepts(held, call) and accepts(held, f"<think>\nHm {{ 1 < 2\n</think>\n\n{call}")
    assert not accepts(held, f"<think>Hm{call}") and not accepts(held, f"Hm</think>{call}")
    fields = ToolFields.model_validate({})
    open_one = MessageReading(reasoning=tags, is_open=True)
    for asked, text in (
        (Grammar.json_object(), "{}"),
        (Grammar.regex("a+"), "aa"),
        (Grammar.choice(["yes", "no"]), "no"),
        (Grammar.ebnf('root ::= "x" | "y"'), "y"),
        (
            Grammar.structural_tag(
                {"type": "structural_tag", "format": {"type": "const_string", "value": "z"}}
            ),
            "z",
        ),
        (
            Grammar.structural_tag(
                {
                    "type": "structural_tag",
                    "structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}],
                    "triggers": ["<n"],
                }
            ),
            "so <n>5</n>",
        ),
    ):
        held = answer_grammar(fields, open_one, asked, lambda name: None)
        assert accepts(held, f"Hm</think>\n\n{text}") and not accepts(held, text)
    assert answer_grammar(fields, open_one, None, lambda name: None) is None


ANALYSIS = "<|channel|>analysis<|message|>Hm { 1 < 2<|end|><|start|>assistant"
OSS_CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bonn"}'


def test_answers_in_channels_are_held_in_theirs(accepts: Judge) -> None:
    required = grammar("gpt_oss", tool_choice="required")
    strict = grammar("gpt_oss", tools=[{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}])
    asked = grammar("gpt_oss", Grammar.json_object())
    alone = grammar("gpt_oss", Grammar.json_object(), tools=[])
    final = "<|channel|>final<|message|>"
    for before in ("", ANALYSIS):
        assert accepts(required, before + OSS_CALL) and accepts(strict, before + OSS_CALL)
        assert not accepts(required, before + OSS_CALL.replace("city", "town"))
        assert not accepts(strict, before + OSS_CALL.replace("city", "town"))
        assert not accepts(required, f"{before}{final}It rains.") and accepts(
            strict, f"{before}{final}It rains."
        )
        for held in (asked, alone):
            assert accepts(held, f"{before}{final}{{}}") and not accepts(held, f"{before}{final}It rains.")
        assert accepts(asked, before + OSS_CALL) and not accepts(alone, before + OSS_CALL)
    assert not accepts(required, OSS_CALL + "<|call|><|start|>assistant" + OSS_CALL)
    assert grammar("gpt_oss") is None and grammar("gpt_oss", tools=[]) is None
    events = fed(MessageReading(TOOL_FORMATS["gpt_oss"], {"weather": {}}), [ANALYSIS + OSS_CALL])
    assert [event.text for event in events if isinstance(event, CallArguments)] == ['{"city": "Bonn"}']


def test_special_tokens_are_asked_for_by_id() -> None:
    fields = ToolFields.model_validate({"tools": TOOLS, "tool_choice": "required"})
    held = answer_grammar(fields, MessageReading(TOOL_FORMATS["mistral"]), None, {"[TOOL_CALLS]": 5}.get)
    assert held is not None and '{"type":"token","token":5}' in held.text and "[TOOL_CALLS]" not in held.text


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        ({"maxLength": 3}, ["", "abc", " b ", "\n\n\n"], ["abc ", "  \t ", "\n\n\n\n"]),
        ({"minLength": 2, "maxLength": 3}, ["ab", "  "], ["a", "", "abcd"]),
        ({"maxLength": 40}, ["a b"], ["x</parameter>y"]),  # at a tag the reader ends
        ({"minLength": 2}, ["ab", "ab\n\ncd"], ["a", "x</parameter>"]),
        ({"pattern": "^(yes|no)$"}, ["yes"], ["yes ", " no", "maybe"]),
        ({"pattern": r"a[\s\S]*"}, ["a\nb ", "a>\n/"], ["b", "a</parameter>", "a<"]),  # tags begin with <
        ({"format": "date"}, ["2024-02-28"], ["2024-02-30", " 2024-02-28", "2024-2-28"]),
        ({"enum": ["a", "b c"]}, ["b c"], [" a", "a\n", "b  c"]),
        ({"const": "word"}, ["word"], ["word\n", "words"]),
    ],
)
def test_text_in_bounds_stands_exactly_between_line_breaks(
    value: dict[str, Any], good: list[str], bad: list[str], accepts: Judge
) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "s": {"type": "string", **value}, "t": {"type": "string"}},
        "required": ["s"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    held = grammar("qwen3_coder", tools=[tool], tool_choice="required")
    begin = "<tool_call>\n<function=f>\n"
    end = "</function>\n</tool_call>"
    others = ("<parameter=n>\n7\n</parameter>\n", "<parameter=t>\nfree  \n</parameter>\n")
    for before, after in (("", ""), others):
        for text, is_good in [(text, True) for text in good] + [(text, False) for text in bad]:
            written = f"{begin}{before}<parameter=s>\n{text}\n</parameter>\n{after}{end}"
            assert accepts(held, written) == is_good, text
            if is_good:
                events = fed(MessageReading(TOOL_FORMATS["qwen3_coder"], {"f": schema}), [written])
                told = "".join(event.text for event in events if isinstance(event, CallArguments))
                assert json.loads(told)["s"] == text
    assert not accepts(held, f"{begin}{others[0]}{end}")  # `s` is required


@pytest.mark.parametrize("format", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            {"type": "string", "pattern": "a<b"},
            r"^at tools\[0\].function.parameters/properties/s: '<' in it",
        ),
        ({"type": "string", "enum": ["a</parameter>", "</arg_value>"]}, "properties/s: a value holds"),
        ({"not": {}}, r"^tools\[0\].function.parameters cannot be followed: at #: no value"),
        (
            {"type": "string", "not": {"const": "a"}},
            r"^tools\[0\].function.parameters cannot .* at #/properties/s/not",
        ),
        ({"$ref": "#/nowhere"}, "does not exist"),
    ],
)
def test_what_cannot_stand_bare_is_refused_by_name(
    format: str, value: Any, said: str, accepts: Judge
) -> None:
    schema = {"type": "object", "properties": {"s": value}, "required": ["s"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(InvalidRequest, match=said):
        accepts(grammar(format, tools=[tool], tool_choice="required"), "")


@pytest.mark.parametrize("format", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"type": "object", "properties": {"a<b": {}}}, "cannot write this name"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array"}}}, "must be an object"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "no value"),
        ({"anyOf": [{"type": "object"}, {"properties": {"a": {}}}]}, "object with properties"),
    ],
)
def test_parameters_that_no_tags_can_hold_are_refused_by_name(format: str, schema: Any, said: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(InvalidRequest, match=said):
        grammar(format, tools=[tool], tool_choice="required")


ANYTHING = [{}, {"title": "now"}, {"$schema": "http://json-schema.org/draft-07/schema#"}]
NO_OBJECTS = [
    {"enum": ["x"]},
    {"const": 5},
    {"allOf": [{"type": "integer"}]},
    {"anyOf": [{"type": "object"}, {"type": "string"}]},
    {"$ref": "#/$defs/s", "$defs": {"s": {"type": "string"}}},
]


@pytest.mark.parametrize("schema", ANYTHING, ids=str)
def test_arguments_are_an_object_though_no_type_says_so(schema: Any, accepts: Judge) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": schema}}
    held = grammar("hermes", tools=[tool], tool_choice="required")
    call = '<tool_call>\n{"name": "now", "arguments": %s}\n</tool_call>'
    assert accepts(held, call % "{}") and accepts(held, call % '{"a": 1}')
    assert not accepts(held, call % "5") and not accepts(held, call % '"now"')


@pytest.mark.parametrize("schema", NO_OBJECTS, ids=str)
def test_arguments_that_are_no_object_are_refused(schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": schema}}
    with pytest.raises(InvalidRequest, match="parameters of a tool must be an object") as refused:
        grammar("hermes", tools=[tool], tool_choice="required")
    assert refused.value.param == "tools[0].function.parameters"


EITHER = [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(14)]
OF_MANY_CASES: dict[str, Any] = {"type": "object", "allOf": EITHER, "properties": {"a0": False, "b0": False}}
"""It has 16,384 cases, all of them empty: 3 s of a processor."""
MULTIPLES = [{"properties": {"a": {"items": {"multipleOf": j}}}} for j in range(1, 60)]
OF_MANY_VALUES = {"type": "object", "enum": [{"a": [i] * 30} for i in range(300)], "allOf": MULTIPLES}
"""Each value is compared with all parts: seconds of a processor, and few steps."""
REFERS = {"$ref": "#/$defs/a", "$defs": {"a": OF_MANY_CASES}}


@pytest.mark.parametrize("schema", [OF_MANY_CASES, OF_MANY_VALUES])
def test_the_types_of_tools_take_little_time(schema: dict[str, Any]) -> None:
    """Streams wait for them. What is left out is looked for where the grammar is compiled, elsewhere."""
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": schema | {"title": str(i)}}}
        for i in range(2)
    ]
    began = time.thread_time()
    held = grammar("hermes", tools=tools, tool_choice="required")
    assert time.thread_time() - began < 1.0
    assert held is not None and held.text.count('{"type":"object","') >= 4  # first and later calls
    elsewhere = {"type": "function", "function": {"name": "f", "parameters": REFERS}}
    with pytest.raises(InvalidRequest, match="must be an object that is easier to tell"):
        grammar("hermes", tools=[elsewhere], tool_choice="required")


def test_no_pattern_of_a_tool_is_followed_before_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """An automaton may take a quarter of a second, and streams would wait for it."""
    made = []
    monkeypatch.setattr(string_rules, "of_pattern", lambda *args, **how: made.append(args))
    properties = {"s": {"type": "string", "pattern": "^(a|b){1,90}([0-9]|[a-f]){1,90}$"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    for format in TOOL_FORMATS:
        with contextlib.suppress(InvalidRequest):  # some can hold to none
            grammar(format, tools=[tool], tool_choice="required")
    assert not made


def test_schemas_that_no_grammar_can_hold_are_not_read() -> None:
    properties = {f"p{i}": {"type": "string", "description": "x" * 20} for i in range(60)}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {"properties": properties}}}
        for i in range(100)
    ]
    with pytest.raises(InvalidRequest, match="the parameters of tools have [0-9]+ bytes, and 131072 is the"):
        grammar("hermes", tools=tools, tool_choice="required")
    assert grammar("hermes", tools=tools) is None


def test_text_in_bounds_stands_exactly_between_tags(accepts: Judge) -> None:
    schema = {
        "type": "object",
        "properties": {"s": {"type": "string", "maxLength": 3}, "n": {"type": "integer"}},
        "required": ["s"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    held = grammar("glm45", tools=[tool], tool_choice="required")
    number = "<arg_key>n</arg_key>\n<arg_value>7</arg_value>\n"
    for text, good in (("abc", True), (" b ", True), ("", True), ("abc ", False), ("\n\n\n\n", False)):
        for after in ("", number):
            written = (
                f"<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>{text}</arg_value>\n{after}</tool_call>"
            )
            assert accepts(held, written) == good, text
            events = fed(MessageReading(TOOL_FORMATS["glm45"], {"f": schema}), [written])
            told = "".join(event.text for event in events if isinstance(event, CallArguments))
            assert json.loads(told) == {"s": text} | ({"n": 7} if after else {})
    assert not accepts(held, f"<tool_call>f\n{number}</tool_call>")  # `s` is required


@pytest.mark.parametrize("format", ["hermes", "llama3_json", "kimi_k2"])
def test_errors_of_compiling_point_where_the_caller_wrote(format: str) -> None:
    """And not into the grammar of the whole answer."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True, "contains": {}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    held = grammar(format, tools=[TOOLS[0], tool], tool_choice="required")
    assert held is not None
    with pytest.raises(InvalidRequest, match=r"^at tools\[1\]\.function\.parameters/properties/a/contains: "):
        Writer().accepts(held, b"")
    asked = grammar(format, Grammar.json_schema(schema))
    assert asked is not None
    with pytest.raises(InvalidRequest, match="^at #/properties/a/contains: "):
        Writer().accepts(asked, b"")
