"""Patterns, formats and lengths of strings are followed to the letter, and refused by name where not."""

from __future__ import annotations

import json
import random
import re
from functools import cache

import pytest

from eyas.common.grammars.automata import both, of_pattern
from eyas.common.grammars.characters import NAMED
from eyas.common.grammars.regex_syntax import UnsupportedPattern, read
from eyas.common.grammars.string_rules import JSON, PLAIN, StringPattern, rules_of
from tests.fuzz import grammars, schemas
from tests.fuzz.walks import Walker


@cache
def walker() -> Walker:
    return Walker(random.Random(0))


def takes(text: StringPattern, found: str) -> bool:
    rules = f'root ::= "\\"" text\n{rules_of(text, JSON, "text")}'
    return walker().takes(walker().compile(rules), json.dumps(found, ensure_ascii=False))


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^a(x[0-9]+)?b$", ["ab", "ax1b"], ["a1b", "axb", "aab"]),
        ("^([ab]|(b|(b+[ab]|(b){0,2})))$", ["", "bb", "bba"], ["aa", "aba"]),
        ("b", ["abc", "b"], ["ac", ""]),
        ("^([A-Z]{2}[0-9](,|$))+$", ["AB1,CD2", "AB1,"], ["AB1CD2", "AB1,,"]),
        ("x(^a|b)", ["xb", "axbc"], ["xa", "a"]),
        ("(foo$|bar)baz", ["barbaz"], ["foobaz", "foo"]),
        (r"a\Z|\Ab", ["ba", "b", "cca"], ["ab", "ac"]),
        (r"\bfoo\b", ["a foo b", "foo", "foo-"], ["afoo", "foo1"]),
        (r"a\Bb", ["ab"], ["a b"]),
        (r"^\B[ -]*$", [" ", "--"], [""]),  # of no text, readers differ
        ("^.$", ['"', "\\", "é", "\t", "\x01"], ["\n", ""]),
        (r"^\d\w\s$", ["1a ", "1a\u3000"], ["٣a ", "1é ", "11a"]),
        (r"^[^\W\d]+$", ["ab"], ["a1", "é", "a-"]),
        (r"^\S\W$", ["a-", "é."], [" -", "aa"]),
        (r"^(?P<a>x)(?<b>y)(?:z)$", ["xyz"], ["xy"]),
        (r"^[\w.-]+@[\w-]+\.com$", ["a.b-c@d.com"], ["@d.com"]),
    ],
)
def test_a_pattern_is_searched_for_with_its_places(pattern: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not takes(StringPattern((pattern,)), text)] == []
    assert [text for text in bad if takes(StringPattern((pattern,)), text)] == []


def test_patterns_and_lengths_stand_together() -> None:
    text = StringPattern(("^[a-z]+$", "ab"), (), 3, 5)
    assert takes(text, "xab") and takes(text, "abcde")
    assert not takes(text, "ab") and not takes(text, "abcdef") and not takes(text, "xyz")
    assert takes(StringPattern((), (), 1, 2), '"\n') and not takes(StringPattern((), (), 1, 2), "abc")
    assert takes(StringPattern((), (), 0, 500), "a" * 500) and not takes(
        StringPattern((), (), 0, 500), "a" * 501
    )
    assert takes(StringPattern(("^[a-c]{2,}$",), (), 0, 300), "abc") and not takes(
        StringPattern(("^[a-c]{2,}$",), (), 0, 300), "a"
    )


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)b", "a look-ahead"),
        ("(?<!a)b", "a look-behind"),
        (r"(a)\1", r"a reference to a group \\1"),
        (r"\p{L}", r"the escape \\p"),
        (r"\k<a>", r"the escape \\k"),
        ("(?i)a", r"\(\?i"),
        ("a**", r"\* is not supported behind a repetition"),
        ("^*", r"\^ cannot be repeated"),
        ("a)b", "a bracket is closed"),
        ("(a", "a bracket is not closed"),
        ("[a", "a class is not closed"),
        ("[b-a]", "a range in a class"),
        ("[]a]", r"a class that begins with \]"),
        ("a$b", "no text fits"),
        ("a{3,2}", "wrong order"),
        ("a{1000000}", "a repetition has more than 99999"),
        ("(a|b)*a(a|b){20}", "it takes more than"),
        ("((a{99}){99}){99}", "its repetitions are too many"),
        (r"\ud800", "is no character"),
        ("a\\", "a backslash ends it"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(pattern: str, reason: str) -> None:
    with pytest.raises(UnsupportedPattern, match=reason):
        rules_of(StringPattern((pattern,)), JSON, "text")


def test_named_sets_are_those_of_python_too() -> None:
    for name, ranges in NAMED.items():
        known = re.compile(f"\\{name}")
        assert [c for a, b in ranges for c in range(a, b + 1) if not known.match(chr(c))] == []


def test_a_long_repetition_is_written_as_it_is_built() -> None:
    assert rules_of(StringPattern(anchored=("(a[bc]){2,5000}",)), PLAIN, "root").count("\n") == 0


def test_random_patterns_let_through_what_matches() -> None:
    assert list(grammars.faults(40, seed=1)) == []


def test_random_schemas_let_through_what_is_valid() -> None:
    assert list(schemas.faults(150, seed=1)) == []


def test_faults_are_seen() -> None:
    """A judge that calls everything right would hide them."""
    date = {"type": "string", "format": "date-time"}
    assert schemas.fault_of(date, '"2024-05-06T07:08:0925Z"') and not schemas.fault_of(
        date, '"2024-05-06T07:08:09Z"'
    )
    assert schemas.fault_of({}, '{"a":  1}') and schemas.fault_of({}, '"\\u00e9"')
    assert schemas.fault_of({"properties": {"a": {"type": "null"}}}, '{"a":1,"a":null}')


@pytest.mark.parametrize("far", [1, 6])
def test_automata_are_as_small_as_can_be(far: int) -> None:
    """Texts whose letter `far` places before the last is an a: a reader must know `far` + 1 letters."""
    made = of_pattern(read(f"(a|b)*a(a|b){{{far}}}"), search=False)
    assert len(made.edges) == 2 ** (far + 1)
    assert len(both(made, made).edges) == 2 ** (far + 1)
