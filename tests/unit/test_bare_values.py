"""Values that stand bare between tags: where they end, and whether they are text or JSON."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from answers import calls, check_cuts, fed, reading, told

from gateway.parsers.message import MessageReading
from gateway.parsers.output import CallArguments, CallStarted, Event
from gateway.parsers.table import TOOL_FORMATS
from gateway.text.templates import ChatTemplate
from tests.chat_templates import TEMPLATES

RNG = random.Random(15)
EXAMPLES: list[tuple[str, str, list[Event]]] = [
    # a tag that nothing follows which may follow a value is the value's own
    (
        "qwen3_coder",
        "<function=g><parameter=b>x</parameter>?</parameter></function>",
        calls(("g", '{"b": "x</parameter>?"}')),
    ),
    (
        "qwen3_coder",
        "<function=g><parameter=b>x</parameter>",
        [CallStarted(0, "g"), CallArguments(0, '{"b": "x"')],
    ),
    (
        "qwen3_coder",
        "<function=g><parameter=b>x</parameter>" + " " * 65 + "</function>",
        calls(("g", '{"b": "x</parameter>' + " " * 65 + '"}')),  # whose tag the model forgot
    ),
    (
        "glm45",
        "<tool_call>g<arg_key>b</arg_key><arg_value>a</arg_value>b</arg_value></tool_call>",
        calls(("g", '{"b": "a</arg_value>b"}')),
    ),
    # one within a string of a JSON value too, whatever follows
    (
        "qwen3_coder",
        '<function=h><parameter=b>\n{"x": "</parameter>\\n</function>"}\n</parameter>\n</function> so',
        [*calls(("h", '{"b": {"x": "</parameter>\\n</function>"}}')), *told("so")],
    ),
    (
        "qwen3_coder",
        '<function=h><parameter=b> "</parameter></function>"\n</parameter></function>',
        calls(("h", '{"b": "</parameter></function>"}')),
    ),
    (
        "glm45",
        '<tool_call>h<arg_key>b</arg_key><arg_value>["</arg_value></tool_call>", "\\""]</arg_value>'
        "</tool_call>",
        calls(("h", '{"b": ["</arg_value></tool_call>", "\\""]}')),
    ),
    (
        "qwen3_coder",
        '<function=h><parameter=b>\n{"</parameter></function>": {}}\n</parameter></function>',
        calls(("h", '{"b": {"</parameter></function>": {}}}')),
    ),
    (
        "glm45",
        '<tool_call>h<arg_key>b</arg_key><arg_value>[[], "</arg_value></tool_call>"]</arg_value></tool_call>',
        calls(("h", '{"b": [[], "</arg_value></tool_call>"]}')),
    ),
    # what only begins like JSON is text up to its tag
    ("qwen3_coder", '<function=h><parameter=b>["a\n</parameter></function>', calls(("h", '{"b": "[\\"a"}'))),
    (
        "qwen3_coder",
        '<function=h><parameter=b>{"x": 1} so</parameter></function>',
        calls(("h", '{"b": "{\\"x\\": 1} so"}')),
    ),
    (
        "qwen3_coder",
        "<function=h><parameter=b>[1, {}, 'x']</parameter></function>",
        calls(("h", """{"b": "[1, {}, 'x']"}""")),
    ),
    ("qwen3_coder", "<function=h><parameter=b>\n[</parameter></function>", calls(("h", '{"b": "["}'))),
    (
        "qwen3_coder",
        '<function=h><parameter=b>{"a" 1}</parameter></function>',
        calls(("h", '{"b": "{\\"a\\" 1}"}')),
    ),
    ("qwen3_coder", '<function=h><parameter=b>["</parameter></function>', calls(("h", '{"b": "[\\""}'))),
]


@pytest.mark.parametrize(("format", "text", "expected"), EXAMPLES)
def test_where_a_value_ends(format: str, text: str, expected: list[Event]) -> None:
    assert check_cuts(reading(format), text, RNG) == expected


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": ["string", "null"]}, "123", "123"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "123", "123"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "123", 123),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"$ref": "#/$defs/zip"}, "01234", "01234"),
        ({"$ref": "#/$defs/zip"}, "12345", "12345"),
        ({"$ref": "#/$defs/none"}, "12345", 12345),
        ({"anyOf": [{"$ref": "#/$defs/zip"}, {"type": "null"}]}, "12345", "12345"),
        ({"anyOf": [{"const": "1"}, {"enum": ["2"]}]}, "1", "1"),
        ({"type": ["string"]}, "1", "1"),
        ({"type": "string"}, "null", "null"),
        ({}, "null", None),
        # Python's words, by the schema
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "true", True),
        ({"type": "null"}, "None", None),
        ({"type": ["integer", "null"]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"type": ["string", "boolean"]}, "True", True),
        ({"type": "object"}, "{'x': True, 'y': [None, 'it\\'s']}", {"x": True, "y": [None, "it's"]}),
        ({"type": "array"}, "('a', 1)", ["a", 1]),
        ({"type": "array"}, "['a\nb', False]", ["a\nb", False]),
        ({"enum": [True, 2]}, "True", True),
        ({"$ref": "#/$defs/flag"}, "False", False),
        ({"type": "number"}, ".5", 0.5),
        ({"type": "string"}, "False", "False"),
        ({"type": "string"}, "None", "None"),
        ({"type": "string"}, "{'x': True}", "{'x': True}"),
        ({"enum": ["None", "x"]}, "None", "None"),
        ({"type": ["string", "integer"]}, "True", "True"),
        ({"type": ["string", "integer"]}, "{'x': True}", "{'x': True}"),
        ({"type": ["string", "boolean"]}, "5", "5"),
        ({"type": ["string", "boolean"]}, '{"x": 1}', '{"x": 1}'),
        ({"type": "boolean"}, "perhaps", "perhaps"),
        ({"type": "object"}, "{'x': b'a'}", "{'x': b'a'}"),
        ({"type": "object"}, "{'x': open('y')}", "{'x': open('y')}"),
        ({}, "True", "True"),
        ({"type": "object"}, '{"x": "a\nb"}', {"x": "a\nb"}),
    ],
)
def test_a_bare_value_is_text_where_its_schema_says_so(schema: Any, written: str, value: Any) -> None:
    whole = {"properties": {"s": schema}, "$defs": {"zip": {"type": "string"}, "flag": {"type": "boolean"}}}
    for format, text in (
        ("glm45", f"<tool_call>f<arg_key>s</arg_key><arg_value>{written}</arg_value></tool_call>"),
        ("qwen3_coder", f"<function=f><parameter=s>\n{written}\n</parameter></function>"),
    ):
        events = fed(MessageReading(TOOL_FORMATS[format], {"f": whole}), [text])
        told = "".join(event.text for event in events if isinstance(event, CallArguments))
        assert json.loads(told) == {"s": value}


MANY: dict[str, Any] = {
    "flag": False,
    "nothing": None,
    "count": 3,
    "half": 0.5,
    "text": "None",
    "word": 'it\'s "so"',
    "map": {"x": True, "y": [None, "z"]},
    "list": [1, "a", False],
}
MANY_SCHEMA = {
    "properties": {
        "flag": {"type": "boolean"},
        "nothing": {"type": ["integer", "null"]},
        "count": {"type": "integer"},
        "half": {"type": "number"},
        "text": {"type": "string"},
        "word": {"type": "string"},
        "map": {"type": "object"},
        "list": {"type": "array"},
    }
}


@pytest.mark.parametrize("format", ["qwen3_coder", "glm45"])
def test_what_a_models_own_template_writes_is_read_back(format: str) -> None:
    """Published templates write values through Jinja's `string`, so models have learnt Python's words."""
    call = {"type": "function", "function": {"name": "f", "arguments": MANY}}
    asked = {"role": "user", "content": "Do."}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = ChatTemplate(TEMPLATES[format], {}).render([asked, answer], add_generation_prompt=False)
    assert format == "glm45" or "\nFalse\n" in text
    events = check_cuts(MessageReading(TOOL_FORMATS[format], {"f": MANY_SCHEMA}), text, RNG, most=20)
    [told] = [event.text for event in events if isinstance(event, CallArguments)]
    assert json.loads(told) == MANY
