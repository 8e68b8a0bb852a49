"""Every schema that is accepted is followed to the letter; what would be followed loosely is refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from eyas.common.config import NANO
from eyas.common.errors import InvalidRequest
from eyas.common.grammars.compiler import GrammarCompiler, library
from eyas.common.grammars.json_schema import rules_of
from eyas.common.grammars.notations import Grammar
from eyas.common.grammars.schemas.document import MAX_DEPTH, MAX_ENUM_VALUES, MAX_PROPERTIES

OBJECT = {"type": "object"}
A = {"type": "object", "properties": {"a": {"type": "integer"}}}
LOOP = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}


def tagged(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Path(NANO))


def follows(schema: Any, text: str) -> bool:
    matcher = library().GrammarMatcher(compiler().compile(Grammar.json_schema(schema)))
    return bool(matcher.accept_string(text) and matcher.is_completed())


REFUSED: list[tuple[Any, str]] = [
    ({"not": {}}, "#"),
    ({"oneOf": [tagged("a"), tagged("a")]}, "#"),
    ({"type": "string", "enum": [1]}, "#"),
    ({"anyOf": [{"$dynamicRef": "#a"}, {"type": "null"}]}, "#/anyOf/0/$dynamicRef"),
    ({**OBJECT, "properties": {"a/b": {"$dynamicRef": "#"}}}, "#/properties/a~1b/$dynamicRef"),
    ({"anyOf": [{"allOf": [{"minimum": "3"}]}, {"type": "null"}]}, "#/anyOf/0/allOf/0/minimum"),
    ({"uniqueItems": 1}, "#/uniqueItems"),
    ({"dependentRequired": {"a": "b"}}, "#/dependentRequired"),
    ({**OBJECT, "not": {"additionalProperties": {"type": "null"}}}, "#/not/additionalProperties"),
    ({"type": "string", "contentMediaType": "text/plain", "contentSchema": {}}, "#/contentSchema"),
    ({"type": "string", "contentMediaType": "application/json"}, "#/contentMediaType"),
    ({"type": "integer", "multipleOf": 2000}, "#/multipleOf"),
    ({"type": "string", "format": "poem"}, "#/format"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 0}, "#"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "#"),
    ({"type": "string", "pattern": "(?=a)b"}, "#/pattern"),
    ({"minLength": -1}, "#/minLength"),
    ({"type": "array", "maxItems": 1.5}, "#/maxItems"),
    ({**OBJECT, "minProperties": "1"}, "#/minProperties"),
    ({"type": "string", "pattern": "a)b"}, "#/pattern"),
    ({"type": "string", "pattern": r"\p{L}"}, "#/pattern"),
    ({"$ref": "http://x/y"}, "#/$ref"),
    ({"$ref": "#/$defs/none"}, "#/$ref"),
    (LOOP, "#/$ref"),
    ({"type": "anything"}, "#/type"),
    ({"type": []}, "#/type"),
    ({"type": "object", "properties": None}, "#/properties"),
    ({"properties": {"a": {"properties": 5}}}, "#/properties/a/properties"),
    ({**A, "required": [["a"]]}, "#/required"),
    ({"type": "string", "format": ["x"]}, "#/format"),
    ({"anyOf": 5}, "#/anyOf"),
    ({"type": "string", "prefixItems": 5}, "#/prefixItems"),
    ({"oneOf": [{"type": [["x"]]}, A]}, "#/oneOf/0/type"),
    ({"oneOf": [{"required": 5}, A]}, "#/oneOf/0/required"),
    ({"oneOf": [{"properties": 5}, A]}, "#/oneOf/0/properties"),
    ({"minimum": "3"}, "#/minimum"),
    ({"minimum": True}, "#/minimum"),
    ({"type": "number", "minimum": 1e-7, "maximum": 2e-7}, "#"),
    ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.000001}, "#"),
    ({"type": "string", "pattern": "a{1000000}"}, "#/pattern"),
    ({"enum": []}, "#/enum"),
    ({"enum": list(range(MAX_ENUM_VALUES + 1))}, "#/enum"),
    ({**OBJECT, "properties": {str(i): {} for i in range(MAX_PROPERTIES + 1)}}, "#"),
]


@pytest.mark.parametrize(("schema", "pointer"), REFUSED)
def test_what_would_be_followed_loosely_is_refused_with_its_place(schema: Any, pointer: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        rules_of(json.loads(json.dumps(schema)))
    assert refused.value.message.startswith(f"at {pointer}: ") or f"at {pointer}:" in refused.value.message
    assert refused.value.param == "grammar"


def test_depth_is_bounded_without_recursion() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequest, match=f"more than {MAX_DEPTH} deep"):
        rules_of(schema)


FOLLOWED: list[tuple[Any, list[str], list[str]]] = [
    ({}, ["1", '{"a":[null]}'], ["", "x"]),
    (True, ["1"], []),
    (OBJECT, ["{}", '{"a":{"b":[1]}}'], ["[]", "1"]),
    (A, ["{}", '{"a":1}', '{ "a" : 1 }'], ['{"b":1}', '{"a":"x"}', '{"a":1,"a":2}']),
    ({**A, "additionalProperties": True}, ['{"a":1,"b":"x"}'], ['{"a":"x"}', '{"a":1,"a":"x"}']),
    ({**A, "required": ["a"]}, ['{"a":-5}'], ["{}"]),
    ({"properties": {"a": {"type": "integer"}}}, ["{}"], ["1"]),
    ({"type": "array"}, ["[]", '[1,{"b":null}]'], ["{}"]),
    (
        {"items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        ["[1]"],
        ["[]", "[1,2,3]"],
    ),
    ({"type": "array", "prefixItems": [{"type": "null"}]}, ["[]", "[null]"], ["[1]", "[null,1]"]),
    ({"minimum": 3}, ["3", "4.5"], ["2", '"a"', "1e1"]),
    ({"type": "integer", "minimum": 3, "maximum": 10}, ["3", "10"], ["2", "11", "3.5"]),
    ({"type": "integer", "multipleOf": 7}, ["0", "7", "21"], ["8"]),
    ({"type": ["integer", "null"], "minimum": 3}, ["5", "null"], ["1", '"a"']),
    ({"maxLength": 2}, ['""', '"éa"'], ['"abc"', "1"]),
    (
        {"maxLength": 3},
        ['"b c"', '"\x7f"'],
        ['"b\tc"', '"\x01"', '"\n"', '"b"c"'],
    ),  # JSON has no such characters
    ({"maxLength": 1}, ['""', '"b"', '"\x7f"'], ['"\t"', '"\x01"', '"bc"']),
    ({"minLength": 1, "maxLength": 1}, ['"b"'], ['""', '"\x1f"', '"\n"']),
    ({"type": "array", "items": {"type": "string", "minLength": 1}}, ['["b"]'], ['["b\t"]', '[""]']),
    ({"type": "string", "pattern": "^[ab]+$"}, ['"ab"'], ['""', '"c"']),
    (
        {"type": "string", "pattern": 'a"|\\\\b|[\\n]|\\tc'},
        ['"a\\""', '"\\\\b"', '"\\n"', '"\\tc"'],
        ['"a""', '"\\b"', '"\n"'],
    ),
    ({"exclusiveMinimum": 0, "maximum": 1e-6}, ["0.000001"], ["0", "0.0000005", "1"]),
    ({"minimum": 0.5, "maximum": 0.5}, ["0.5"], ["0.4", "1"]),
    (
        {"type": "string", "format": "date"},
        ['"2024-12-31"', '"2020-01-01"', '"2024-02-29"', '"2000-02-29"'],
        ['"2024-13-01"', '"x"', '"2023-02-30"', '"2023-02-29"', '"1900-02-29"', '"0000-01-01"'],
    ),
    (
        {"type": "string", "format": "time"},
        ['"23:59:59.5+01:00"', '"00:00:00Z"'],
        ['"02:01:60Z"', '"24:00:00Z"'],
    ),
    (
        {"type": "string", "format": "date-time"},
        ['"2020-02-29T01:02:03Z"'],
        ['"2021-02-29T01:02:03Z"', '"2020-02-29"'],
    ),
    ({"type": "string", "format": "ipv4"}, ['"0.10.200.255"'], ['"01.2.3.4"', '"1.2.3.256"']),
    ({"type": "string", "format": "email"}, ['"a.b@example.org"'], ['"\\"\\q\\"@ab.cd"', '"a"']),
    (
        {"type": "string", "format": "json-pointer"},
        ['""', '"/a~1b/0"'],
        ['"/a"b"', '"/\x03"', '"/a\\s"', '"a"'],
    ),
    ({"type": "string", "format": "relative-json-pointer"}, ['"1/a"', '"0#"'], ['"5/a\\s"', '"/a"']),
    ({"type": "string", "enum": ["a", 1, None]}, ['"a"'], ["1", "null"]),
    ({"enum": ["a", 1, None, [1]]}, ['"a"', "1", "null", "[1]"], ["2"]),
    ({"const": {"a": 1}}, ['{"a":1}'], ["{}"]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"'], ["null"]),
    ({"oneOf": [tagged("a"), tagged("b")]}, ['{"kind":"a"}', '{"kind":"b"}'], ['{"kind":"c"}', "{}"]),
    (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {n: tagged(n) for n in "ab"}},
        ['{"kind":"b"}'],
        ["{}"],
    ),
    ({"anyOf": [{"type": "string", "maxLength": 1}, {"type": "null"}], "default": None}, ["null"], ['"ab"']),
    ({**OBJECT, "properties": {"x": {"$ref": "#"}}}, ['{"x":{"x":{}}}'], ['{"x":1}']),
    ({**OBJECT, "propertyNames": {"maxLength": 1}}, ['{"a":1}'], ['{"aa":1}']),
    ({**OBJECT, "patternProperties": {"^a": {"type": "integer"}}}, ['{"a":1}'], ['{"b":1}', '{"a":"x"}']),
    ({**OBJECT, "minProperties": 1, "additionalProperties": {"type": "null"}}, ['{"a":null}'], ["{}"]),
    ({"type": "array", "uniqueItems": True}, ['[1,"a"]'], ["[1,1]", '["a","a"]', "[{},{}]", "[0.5,0.5]"]),
    ({"items": {"enum": [1, 1.0, 2, "a"]}, "uniqueItems": True}, ["[2,1]"], ["[1,1]", "[1,1.0]"]),
    (
        {"uniqueItems": True, "items": {"type": "string"}, "minItems": 2},
        ['["red","blue"]'],
        ['["a"]', '["a","a"]'],
    ),
    ({"uniqueItems": True, "items": {"type": "integer", "minimum": 0}}, ["[3,1]"], ["[1,7,1]", "[1,1]"]),
    (
        {
            "$ref": "#/$defs/l",
            "uniqueItems": True,
            "$defs": {"l": {"type": "array", "items": {"enum": [1, 2]}}},
        },
        ["[2,1]", "[]"],
        ["[1,1]", "[3]"],
    ),
    ({"enum": [[1, 1], [1, 2]], "uniqueItems": True}, ["[1,2]"], ["[1,1]"]),
    (
        {"contains": {"const": 1}, "maxContains": 1, "type": "array"},
        ["[1]", '[2, "a", 1]'],
        ["[]", "[1,1]", "[2]"],
    ),
    ({**OBJECT, "dependentRequired": {"a": ["b"]}}, ['{"a":1,"b":2}', '{"c":1}'], ['{"a":1}']),
    ({"allOf": [OBJECT, A]}, ['{"a":1}'], ['{"a":"x"}', "1"]),
    ({"allOf": [{"type": "integer"}], "minimum": 3}, ["3"], ["2", "3.5"]),
    ({**A, "anyOf": [{"required": ["a"]}]}, ['{"a":1}'], ["{}", '{"a":"x"}']),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["0.5"], ["1", "2.0"]),
    ({"oneOf": [{"const": 1}, {"const": 1.0}, {"const": 2}]}, ["2"], ["1", "1.0"]),
    (
        {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
        ["2", "6"],
        ["4", "3"],
    ),
    ({"type": "number", "multipleOf": 0.5}, ["1.5", "-2"], ["0.3", "1e1"]),
    ({"type": "integer", "multipleOf": 5, "minimum": 3}, ["5", "100"], ["0", "3", "-5"]),
    ({"$ref": "#/$defs/q", "minimum": 3, "$defs": {"q": {"type": "integer"}}}, ["3"], ["2", '"a"']),
    ({"required": ["a"]}, ['{"a":{}}'], ["{}", '{"b":1}']),
    (
        {"minProperties": 2, "type": "object"},
        ['{"a":1,"x":2}'],
        ['{"a":1}', '{"a":1,"a":2}', '{"x":1,"x":1}'],
    ),
    ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": False}, ["{}"], ['{"a":1}', '{"c":1}']),
    ({"propertyNames": {"enum": ["a", "b"]}}, ['{"a":1}', '{"a":1,"b":2}'], ['{"c":1}']),
    ({"properties": {"ab": {}, "c": {}}, "propertyNames": {"maxLength": 1}}, ['{"c":1}'], ['{"ab":1}']),
    ({"minimum": 3, "maxLength": 3}, ["3", '"abc"'], ["2", '"abcd"']),
    ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, ['{"a":1,"b":2}', '{"c":1}'], ['{"a":1}']),
    ({"type": ["integer", "string"], "not": {"enum": [5, "a"]}}, ["4", '"ab"', '"b"'], ["5", '"a"']),
    (
        {"enum": [2**63, 2**64 + 1, 1]},
        ["9223372036854775808", "18446744073709551617"],
        ["9.223372036854776e18"],
    ),
    ({"const": {"n": -(2**70)}}, ['{"n":-1180591620717411303424}'], ['{"n":-1.1805916207174113e+21}']),
    (
        {
            "properties": {n: {"$ref": "#/$defs/x~1y~0%25"} for n in "ab"},
            "$defs": {"x/y~%": {"type": "null"}},
        },
        ['{"a":null}'],
        ['{"a":1}'],
    ),
    (
        {
            "properties": {
                n: {"$ref": "#/$defs/i"} for n in ("default", "enum", "const", "$ref", "examples")
            },
            "$defs": {"i": {"type": "integer"}},
        },
        ['{"default":1,"enum":2}', '{"$ref":1}'],
        ['{"enum":"x"}', '{"$ref":"x"}'],
    ),
    ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, ['{"a":1}'], ['{"b":1}']),
    ({"oneOf": [{"minimum": 5}, {"then": {}}]}, ["4"], ["5", '"a"', "null"]),  # a text fits both
    ({"type": "number", "not": {"type": "integer"}}, ["0.5"], ["5", "5.0", "51322315984152552.7"]),
    ({"type": "integer", "format": "int32"}, ["2147483647"], ["2147483648"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), FOLLOWED)
def test_what_is_accepted_is_followed(schema: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not follows(schema, text)] == []
    assert [text for text in bad if follows(schema, text)] == []


def test_white_space_has_an_end() -> None:
    assert follows(A, '{\n    "a": 1\n}')
    assert not follows(A, "{" + " " * 200 + '"a":1}')
