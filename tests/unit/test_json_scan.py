"""A JSON value ends where JSON says it does, however its characters come."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from gateway.parsers.source import JsonScan

VALUES = [
    *("{}", "[]", '""', '{"a": {}}', '{"a": []}', "[{}]", "[[]]", '{"a": {}, "b": 1}', '[{}, [], ""]'),
    *('{"a": {"b": {}}}', '[{"a": []}, {}]', '{"": ""}', '{ "a" : [ ] }', '["]}\\"", {"{": null}]'),
]


@pytest.mark.parametrize("text", VALUES)
def test_a_value_ends_with_its_last_bracket_or_quote(text: str) -> None:
    json.loads(text)
    assert ends(text + '}]"', len(text)) == ends(text + '}]"', 1) == len(text)


def test_values_of_every_shape_end_where_they_do() -> None:
    pick = random.Random(41)
    for _ in range(2000):
        text = json.dumps(value(pick, 0), indent=pick.choice((None, 1)), ensure_ascii=pick.random() < 0.5)
        assert ends(text + ", more", pick.randrange(1, 6)) == len(text), text


@pytest.mark.parametrize(
    "text", ["}", "]", '{"a"}', '{"a" 1}', "{1: 2}", "[1}", '{"a": ]', "[,]", '{"a": {}: 1}', '"\n', "x"]
)
def test_what_no_value_begins_with_fails(text: str) -> None:
    assert ends(text, 1) is None


def ends(text: str, piece: int) -> int | None:
    """Where the value ends that the text begins with, told `piece` characters at a time; None: it fails."""
    scan, at = JsonScan(), 0
    for told in range(piece, len(text) + piece, piece):
        at = scan.find(text[:told], at)
        if scan.failed:
            return None
        if scan.over:
            return at
    raise AssertionError(f"{text!r} neither ends nor fails")


def value(pick: random.Random, depth: int) -> Any:
    """An object, an array or a string; in them, any value."""
    kind = pick.randrange(3 if depth == 0 else 6 if depth < 4 else 3)
    inside = [value(pick, depth + 1) for _ in range(pick.randrange(3))] if depth < 4 else []
    match kind:
        case 0:
            return {text(pick): one for one in inside}
        case 1:
            return inside
        case 2:
            return text(pick)
    return pick.choice([None, True, -2.5e-7, 10**20, 0])


def text(pick: random.Random) -> str:
    return "".join(pick.choices('ab{}[]":,\\\n\té\u2028\U0001f642', k=pick.randrange(5)))
