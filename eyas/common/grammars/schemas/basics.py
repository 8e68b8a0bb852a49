"""Rules of JSON that every schema's rules are made of, and what objects and arrays need of their writer."""

from __future__ import annotations

import json
from typing import Any, Protocol

from eyas.common.grammars.schemas.branches import Term, ValueCase
from eyas.common.grammars.schemas.terms import SchemaTerms
from eyas.common.grammars.string_rules import quoted

ANY = "basic_any"
_PLAIN = r"[^\0-\x1f\"\\\ud800-\udfff]"

BASICS = {
    "basic_escape": r'["\\bfnrt] | "u00" ("0" [1-7be-f] | "1" [0-9a-f])',
    "basic_string_sub": rf'"\"" | {_PLAIN} basic_string_sub | "\\" basic_escape basic_string_sub',
    ANY: "basic_number | basic_string | basic_boolean | basic_null | basic_array | basic_object",
    "basic_integer": '"0" | "-"? [1-9] [0-9]*',
    "basic_number": r'"-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+\-]? [0-9]+)?',
    "basic_string": r'"\"" basic_string_sub',
    "basic_boolean": '"true" | "false"',
    "basic_null": '"null"',
    "basic_array": '"[" "]" | "[" basic_any basic_more_items* "]"',
    "basic_more_items": '"," basic_any',
    "basic_object": '"{" "}" | "{" basic_pair basic_more_pairs* "}"',
    "basic_more_pairs": '"," basic_pair',
    "basic_pair": 'basic_string ":" basic_any',
}


def constant(value: Any) -> str:
    """The right side of a rule for one value."""
    match value:
        case [*items] if items:
            inside = ' "," '.join(map(constant, items))
            return f'"[" {inside} "]"'
        case dict() if value:
            pairs = ' "," '.join(f"{key(name)} {constant(part)}" for name, part in value.items())
            return f'"{{" {pairs} "}}"'
        case [] | {}:
            return '"[" "]"' if value == [] else '"{" "}"'
    return quoted(json.dumps(value, ensure_ascii=False))


def key(name: str) -> str:
    """A property's name, and what stands before its value."""
    return f'{quoted(json.dumps(name, ensure_ascii=False))} ":"'


class GrammarRules(Protocol):
    """Rules that grow, one for each term."""

    terms: SchemaTerms

    def put(self, name: str, side: str) -> str:
        """Adds a rule; its name."""

    def value(self, term: Term) -> str:
        """The name of the rule for the values of a term."""

    def is_dead(self, term: Term) -> bool:
        """Whether no value of the term can be written."""

    def cases(self, term: Term) -> list[ValueCase]:
        """The term's cases that have values."""

    def side(self, case: ValueCase, name: str) -> str:
        """The right side of a rule for the values of a case."""
