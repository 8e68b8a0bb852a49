"""Calls written as Python: what a schema describes can be written, and nothing that is read otherwise."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from answers import fed
from call_writer import Writer, demanded, random_parameters
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.common.errors import InvalidRequest
from eyas.common.grammars.notations import Grammar
from gateway.parsers.output import CallArguments

WRITER = Writer()
_LONG_EXPONENT = re.compile(r"[eE][+-]?[0-9]{3,}")


class Number(str):
    """A number as it is written."""


def python(value: Any) -> str:
    """Plain Python for a JSON value."""
    match value:
        case Number():
            return str(value)
        case None | bool():
            return str(value)
        case list():
            return "[" + ", ".join(map(python, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{python(key)}: {python(part)}" for key, part in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def obj(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def can_write(schema: Any, arguments: str) -> bool:
    return WRITER.accepts(demanded("pythonic", schema)[0], f"[f({arguments})]".encode())


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32))
def test_what_a_schema_describes_can_be_written(seed: int) -> None:
    pick = random.Random(seed)
    schema = random_parameters(pick) | {"additionalProperties": False}
    text = WRITER.write(Grammar.json_schema(schema), pick)
    if text is None or "\\ud" in text.lower() or _LONG_EXPONENT.search(text):
        return  # half a pair is no text, and no float has such an exponent
    value = json.loads(text, parse_int=Number, parse_float=Number)
    written = ", ".join(f"{name}={python(part)}" for name, part in value.items())
    grammar, reading = demanded("pythonic", schema)
    assert WRITER.accepts(grammar, f"[f({written})]".encode()), written
    told = "".join(
        event.text for event in fed(reading, [f"[f({written})]"]) if isinstance(event, CallArguments)
    )
    assert json.loads(told) == json.loads(text)


@pytest.mark.parametrize("must", [(), ("a",), ("b",), ("c",), ("a", "c"), ("a", "b", "c")])
def test_arguments_stand_in_order_with_commas_between(must: tuple[str, ...]) -> None:
    schema = obj(must, a={"type": "integer"}, b={"type": "integer"}, c={"type": "integer"})
    for chosen in range(8):
        names = [name for i, name in enumerate("abc") if chosen >> i & 1]
        written = ", ".join(f"{name}=1" for name in names)
        assert can_write(schema, written) == (set(must) <= set(names)), written
    for wrong in (
        "b=1, a=1",
        "a=1, ",
        ", a=1",
        "a=1 b=1",
        "a=1, a=1, b=1, c=1",
        "a=1,, c=1",
        "a=1, b=1, c=1, d=1",
    ):
        assert not can_write(schema, wrong), wrong


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        ({"type": "boolean"}, ["True", "False"], ["true", "1", "None"]),
        ({"type": "null"}, ["None"], ["null"]),
        (
            {"enum": ["a", None, True, [1, None], {"k": False}]},
            ['"a"', "None", "[1, None]", '{"k": False}'],
            ["null"],
        ),
        ({"enum": ["null", "[true]", "é/\n"]}, ['"null"', '"[true]"', '"é/\\n"'], ["None", '"é\\/\\n"']),
        (
            {"type": "string"},
            ['""', '"é\\"\\\\\\n \U0001f642"'],
            ["'a'", '"\\/"', '"\\ud83d\\ude42"', '"\n"'],
        ),
        ({"type": "string", "pattern": "null|true"}, ['"null"', '"true"'], ['"None"', "None"]),
        ({"type": "string", "maxLength": 2}, ['"é\U0001f642"', '""'], ['"abc"']),
        ({"type": "number"}, ["1", "-2.5", "1e9", "2E-07"], ["1e999", ".5", "1_000", "0x1", "inf"]),
        ({"type": "number", "minimum": 0, "maximum": 1}, ["0.25", "1"], ["1.5", "-1"]),
        ({"type": "integer", "multipleOf": 5}, ["15", "-10"], ["7", "5.0"]),
        (
            {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            ["[]", "[True, False]"],
            ["(True,)", "[1]"],
        ),
        ({}, ['{"a": [None, {"b": True}]}', "[]"], ["null", "{a: 1}", "{1: 2}", "set()", "f()"]),
        (obj(("x",), x={"type": "null"}), ['{"x": None}'], ["{}", '{"x": null}', "{'x': None}"]),
        ({"$ref": "#/$defs/n"}, ["None", "[None, [None]]"], ["[1]", "null"]),
    ],
)
def test_values_are_pythons(value: Any, good: list[str], bad: list[str]) -> None:
    nest = {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/n"}}]}
    schema = obj(("a",), a=value) | {"$defs": {"n": nest}}
    for text in good:
        assert can_write(schema, f"a={text}"), text
    for text in bad:
        assert not can_write(schema, f"a={text}"), text


def test_names_are_written_as_they_are_or_refused() -> None:
    for name in ("from", "class", "None", "user-id", "a.b", "ü", "_"):
        assert can_write(obj((name,), **{name: {"type": "integer"}}), f"{name}=1"), name
    for name in ("", "a b", "1a", "a=b", "a,b", "a)"):
        with pytest.raises(InvalidRequest, match="cannot write this name"):
            demanded("pythonic", obj(**{name: {"type": "integer"}}))


def test_a_tool_of_any_arguments_takes_any() -> None:
    for written in ("", "a=1", 'a=[None, "x"], b_2={"k": True}'):
        assert can_write({"type": "object"}, written), written
    for written in ("1", "a", "a=null", "1a=2", "a=1,"):
        assert not can_write({"type": "object"}, written), written


def test_parameters_may_be_of_several_kinds() -> None:
    schema = {"anyOf": [obj(("a",), a={"type": "integer"}), obj(("b",), b={"type": "null"})]}
    assert can_write(schema, "a=1") and can_write(schema, "b=None")
    assert not can_write(schema, "a=1, b=None") and not can_write(schema, "")


def test_many_optional_arguments_make_no_huge_grammar() -> None:
    schema = obj(**{f"name_{i}": {"type": "integer"} for i in range(50)})
    grammar, _ = demanded("pythonic", schema)
    grammar.validate()
    assert can_write(schema, "name_3=1, name_17=2, name_39=3") and not can_write(schema, "name_3=1, name_2=2")
