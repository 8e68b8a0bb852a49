"""JSON is written as a printer writes it: white space has an end, and each character has one spelling."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from eyas.common.config import NANO
from eyas.common.grammars.compiler import GrammarCompiler, library
from eyas.common.grammars.notations import Grammar

VALUE: dict[str, Any] = {"a": [1, {"b": "x", "c": []}], "d": {"e": None}, "f": {}, "g": [True, [2, [3]]]}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {}},
        "d": {"type": "object", "properties": {"e": {"type": "null"}}},
        "f": {"type": "object"},
        "g": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "array"}], "items": False},
    },
    "required": ["a", "d", "f", "g"],
}


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Path(NANO))


def follows(grammar: Grammar, text: str | bytes) -> bool:
    matcher = library().GrammarMatcher(compiler().compile(grammar))
    return bool(matcher.accept_string(text) and matcher.is_completed())


@pytest.mark.parametrize("grammar", [Grammar.json_object(), Grammar.json_schema(SCHEMA)])
def test_what_printers_write_is_allowed_and_no_endless_run(grammar: Grammar) -> None:
    compact = json.dumps(VALUE, separators=(",", ":"))
    texts = [json.dumps(VALUE), compact, *(json.dumps(VALUE, indent=by) for by in (2, 4, "\t"))]
    assert [text for text in texts if not follows(grammar, text)] == []
    for run in ("  ", "\n\n", "\n" * 20, " \n", "\t", "\r\n"):
        assert not follows(grammar, compact.replace('{"a"', "{" + run + '"a"'))
        assert not follows(grammar, compact.replace('"a":', '"a":' + run))
        assert not follows(grammar, compact.replace("1,", "1" + run + ","))
    assert not follows(grammar, compact.replace('{"a"', "{\n" + " " * 80 + '"a"'))
    assert follows(grammar.compact(), compact) and not follows(grammar.compact(), json.dumps(VALUE))


def test_nothing_between_brackets_has_white_space_once() -> None:
    for schema in (
        {"properties": {"b": {}, "c": {}}},
        {"properties": {"b": {}}, "additionalProperties": False},
    ):
        for text in ("{}", "{ }", "{\n}"):
            assert follows(Grammar.json_schema({"type": "object", **schema}), text)
        for text in ("{  }", "{ \n}", "{\n  \n}"):
            assert not follows(Grammar.json_schema({"type": "object", **schema}), text)
        assert follows(Grammar.json_schema({"type": "object", **schema}), '{\n  "c": 1\n}') == (
            "c" in schema["properties"]
        )


def test_deep_values_are_indented() -> None:
    value: Any = 1
    for _ in range(12):
        value = {"a": [value]}
    assert follows(Grammar.json_object(), json.dumps(value))
    value = 1
    for _ in range(7):
        value = {"a": [value]}
    assert follows(Grammar.json_object(), json.dumps(value, indent=4))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"type": "string"},
            ['"é"', '"\\n"', '"\\u0001"', '"/"'],
            ['"\\ud83d"', '"\\u00e9"', '"\\/"', '"\\u000a"'],
        ),
        (
            {"properties": {"a": {"type": "integer"}}, "additionalProperties": True},
            ['{"a":1}', '{"a":1,"b":"x"}', '{"ab":"x"}', '{"":"x"}'],
            ['{"a":1,"\\u0061":"x"}', '{"a":"x"}', '{"a":1,"a":"x"}', '{"\\u0061":1}'],
        ),
        (
            {"properties": {'é"\n': {"type": "integer"}}, "additionalProperties": {"type": "null"}},
            ['{"é\\"\\n":1}', '{"é":null}', '{"é\\"\\n":1,"Ã":null}'],
            ['{"é\\"\\n":null}', '{"é\\"\\n":1,"é\\"\\n":null}'],
        ),
    ],
)
def test_each_character_has_one_spelling(schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = Grammar.json_schema(schema)
    assert [text for text in good if not follows(grammar, text)] == []
    assert [text for text in bad if follows(grammar, text)] == []


@pytest.mark.parametrize(
    "part",
    [
        {"type": "regex", "pattern": "[^a]+"},
        {"type": "grammar", "grammar": "root ::= [^a]+"},
        {"type": "json_schema", "json_schema": {"type": "string"}},
    ],
)
def test_no_part_of_a_tag_takes_half_a_character(part: dict[str, Any]) -> None:
    content = '"é🙂"' if part["type"] == "json_schema" else "é🙂"
    form = {"type": "tag", "begin": "<t>", "content": part, "end": "</t>"}
    grammar = Grammar.structural_tag({"type": "structural_tag", "format": form})
    assert follows(grammar, f"<t>{content}</t>")
    for half in (b"\xed\xa0\x80", b"\xed\xb0\x80"):
        assert not follows(grammar, f"<t>{content}</t>".encode().replace("é".encode(), half))
