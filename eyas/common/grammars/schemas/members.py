"""Objects as rules: properties in the order of the schema, then those that it does not name.

An object holds as many properties as it must: names that are not the schema's own differ in their first
characters where they count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from eyas.common.grammars.schemas import strings, texts
from eyas.common.grammars.schemas.basics import GrammarRules, key
from eyas.common.grammars.schemas.branches import Term, ValueCase
from eyas.common.grammars.schemas.document import refuse
from eyas.common.grammars.schemas.terms import SchemaTerms, term_of
from eyas.common.grammars.schemas.texts import StringRules

_MOST_STATES = 4000
_MOST_PATTERNS = 3  # whose names are kept distinct
_OF_ALL = {"additionalProperties", "unevaluatedProperties"}
_OF_OTHERS = {"patternProperties", *_OF_ALL}


@dataclass(frozen=True)
class OtherProperties:
    """Properties that the schema does not name: their names, and what is said of them."""

    name: StringRules
    term: Term


def parts(terms: SchemaTerms, case: ValueCase) -> Iterator[Term]:
    """Returns the constraints of each property."""
    for name in _spoken(terms, case):
        yield terms.property(case, name)
    for other in others(terms, case):
        yield other.term


def lives(writer: GrammarRules, case: ValueCase) -> bool:
    """Whether there is such an object."""
    if any(writer.is_dead(writer.terms.property(case, name)) for name in case.required):
        return False
    able = [
        name for name in _spoken(writer.terms, case) if not writer.is_dead(writer.terms.property(case, name))
    ]
    if case.most is not None and len(case.required) > case.most:
        return False
    missing = case.least - len(able)
    if missing <= 0:
        return True
    return missing <= sum(len(_classes(one.name)) for one in _able(writer, case))


def others(terms: SchemaTerms, case: ValueCase) -> list[OtherProperties]:
    """Returns the properties that an object may have beside the named ones.

    Where properties are declared there are no others, unless a keyword allows them or more are required.
    """
    if _is_closed(terms, case):
        return []
    names = _names(terms, case)
    if names is None:
        return []
    excluded = frozenset(terms.names(case))
    schemas = [layer.node.schema for layer in case.layers]
    speaks_of_others = not terms.patterns(case) or any(_OF_ALL & schema.keys() for schema in schemas)
    properties = []
    for name in names:
        name = replace(name, excluded=name.excluded | excluded)
        for matched, text in _by_patterns(terms, case, name):
            if not matched and not speaks_of_others:
                continue
            properties.append(OtherProperties(text, terms.others(case, matched)))
    return properties


def _by_patterns(
    terms: SchemaTerms, case: ValueCase, name: StringRules
) -> Iterator[tuple[tuple[str, ...], StringRules]]:
    """Returns combinations of matched patterns, and the names of each."""
    patterns = terms.patterns(case)
    if len(patterns) <= _MOST_PATTERNS and all(map(strings.is_exact, patterns)):
        for signs in itertools.product((True, False), repeat=len(patterns)):
            pairs = [
                (texts.simple(pattern, "#"), sign) for pattern, sign in zip(patterns, signs, strict=True)
            ]
            matched = tuple(pattern for pattern, sign in zip(patterns, signs, strict=True) if sign)
            yield matched, replace(name, patterns=(*name.patterns, *pairs))
    elif sum(len(layer.node.schema.keys() & _OF_OTHERS) > 0 for layer in case.layers) == 1:
        for pattern in patterns:  # such names may match the others too: all that is said then holds
            yield (
                tuple(patterns),
                replace(name, patterns=(*name.patterns, (texts.simple(pattern, "#"), True))),
            )


def _is_closed(terms: SchemaTerms, case: ValueCase) -> bool:
    layers = [layer.node.schema for layer in case.layers]
    words = ("additionalProperties", "unevaluatedProperties", "propertyNames", "patternProperties")
    if not any(schema.get("properties") for schema in layers) or case.least > len(_spoken(terms, case)):
        return False
    return not case.names and not any(word in schema for schema in layers for word in words)


def _names(terms: SchemaTerms, case: ValueCase) -> list[StringRules] | None:
    """How names may be; None: they are all spoken of."""
    if not case.names:
        return [StringRules()]
    cases = [one for one in terms.cases(term_of(case.names)) if one.kind == "string"]
    return [one.text for one in cases if one.values is None] or None


def _spoken(terms: SchemaTerms, case: ValueCase) -> list[str]:
    names = terms.names(case)
    for one in terms.cases(term_of(case.names)) if case.names else ():
        names += [value for value in one.values or () if isinstance(value, str) and value not in names]
    return names


def _able(writer: GrammarRules, case: ValueCase) -> list[OtherProperties]:
    return [
        one
        for one in others(writer.terms, case)
        if not writer.is_dead(one.term) and not strings.is_empty(one.name)
    ]


def _classes(name: StringRules) -> list[StringRules]:
    return strings.classes(name)


def side(writer: GrammarRules, case: ValueCase, name: str) -> str:
    """The right side of a rule for such objects."""
    return _ObjectRules(writer, case, name).side()


class _ObjectRules:
    """The rules of one object. A state: how many properties are behind, how many were written (as far as it
    matters), which classes of other names there were, and whether it is the beginning.
    """

    def __init__(self, writer: GrammarRules, case: ValueCase, name: str) -> None:
        self._writer = writer
        self._case = case
        self._name = name
        terms = writer.terms
        spoken = {one: terms.property(case, one) for one in _spoken(terms, case)}
        self._named = [(one, term) for one, term in spoken.items() if not writer.is_dead(term)]
        self._others = _able(writer, case)
        required = len(case.required)
        self._counts = case.most is not None or case.least > required
        self._cap = case.least if case.most is None else case.most
        self._states: dict[Any, str] = {}
        self._todo: list[Any] = []
        self._free = ""

    def side(self) -> str:
        self._free = self._rule_of([(other.name, other.term) for other in self._others], "other")
        start = self._state(0, 0, (), True)
        while self._todo:
            state = self._todo.pop()
            self._writer.put(self._states[state], " | ".join(self._alternatives(*state)) or '""')
        return f'"{{" {start} "}}"'

    def _state(self, at: int, count: int, used: tuple[int, ...], first: bool) -> str:
        state = (at, count if self._counts else 0, used, first)
        if state not in self._states:
            if len(self._states) > _MOST_STATES:
                refuse(self._case.where(), "minProperties and maxProperties leave too much open")
            self._states[state] = f"{self._name}_{len(self._states)}"
            self._todo.append(state)
        return self._states[state]

    def _can(self, at: int, count: int, used: tuple[int, ...]) -> bool:
        """Whether an object can end from here."""
        if not self._counts:
            return True
        left = [name for name, _ in self._named[at:]]
        must = sum(name in self._case.required for name in left)
        if self._case.most is not None and count + must > self._case.most:
            return False
        more = sum(len(_classes(other.name)) for other in self._others) - len(used)
        return count + len(left) + more >= self._case.least

    def _alternatives(self, at: int, count: int, used: tuple[int, ...], first: bool) -> Iterator[str]:
        comma = "" if first else '"," '
        most, least = self._case.most, self._case.least
        following = min(count + 1, self._cap)
        is_full = self._counts and most is not None and count >= most
        while at < len(self._named):
            name, term = self._named[at]
            if not is_full and self._can(at + 1, count + 1, used):
                behind = self._state(at + 1, following, used, False)
                yield f"{comma}{key(name)} {self._writer.value(term)} {behind}"
            if name in self._case.required or not self._can(at + 1, count, used):
                return
            if not first:
                yield self._state(at + 1, count, used, False)
                return
            at += 1  # what may come first is one rule: others within others would take time
        if not self._counts or count >= least:
            yield '""'
        if not self._others or is_full:
            return
        if not self._counts or (most is None and count >= least):
            more = self._writer.put(f"{self._name}_others", f'"," {self._free}')
            yield f"{comma}{self._free} {more}*"
        elif count + 1 >= least and not used:
            yield f"{comma}{self._free} {self._state(at, following, (), False)}"
        else:
            yield from self._distinct(at, count, used, comma)

    def _distinct(self, at: int, count: int, used: tuple[int, ...], comma: str) -> Iterator[str]:
        """Others whose names must be of classes that were not there."""
        following = min(count + 1, self._cap)
        classes = [(one, other.term) for other in self._others for one in _classes(other.name)]
        for i, (name, term) in enumerate(classes):
            if i in used:
                continue
            now = () if count + 1 >= self._case.least else tuple(sorted((*used, i)))
            if self._can(at, count + 1, now):
                rule = self._rule_of([(name, term)], f"other{i}")
                yield f"{comma}{rule} {self._state(at, following, now, False)}"

    def _rule_of(self, pairs: list[tuple[StringRules, Term]], suffix: str) -> str:
        rule, sides = f"{self._name}_{suffix}", list[str]()
        for i, (name, term) in enumerate(pairs):
            for one, side in strings.rules(
                name, f"{rule}_{i}", self._case.where("patternProperties")
            ).items():
                self._writer.put(one, side)
            sides.append(f'{rule}_{i} ":" {self._writer.value(term)}')
        return self._writer.put(rule, " | ".join(sides)) if sides else ""
