"""Arrays as rules: items by place, how many fit a schema, and none twice.

Where items must differ, each is of a class of its own: a value, or strings that begin alike, or integers that
leave the same when divided.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from eyas.common.grammars.schemas import machines, strings
from eyas.common.grammars.schemas.basics import GrammarRules, constant
from eyas.common.grammars.schemas.branches import SchemaLiteral, Term, ValueCase
from eyas.common.grammars.schemas.document import refuse
from eyas.common.grammars.schemas.terms import SchemaTerms, key_of, term_of
from eyas.common.grammars.schemas.values import same

_MOST_STATES = 1500
_MOST_IN_ANY_ORDER = 6
_RESIDUES = 6


def parts(terms: SchemaTerms, case: ValueCase) -> Iterator[Term]:
    """Returns the constraints of each item."""
    for place in (*range(terms.places(case)), None):
        term = terms.item(case, place)
        yield term
        for signs in itertools.product((None, True, False), repeat=min(len(case.contained), 4)):
            yield _with(term, case, signs)


def lives(writer: GrammarRules, case: ValueCase) -> bool:
    """Whether there is such an array, as far as its items by place tell."""
    terms = writer.terms
    for place in range(min(case.least, terms.places(case) + 1)):
        if writer.is_dead(terms.item(case, place)):
            return False
    return all(
        not one.least
        or not all(
            writer.is_dead(_with(terms.item(case, at), case, _only(case, i)))
            for at in (*range(terms.places(case)), None)
        )
        for i, one in enumerate(case.contained)
    )


def side(writer: GrammarRules, case: ValueCase, name: str) -> str:
    """The right side of a rule for such arrays."""
    if case.unique:
        return _ArrayRules(writer, case, name, _UniqueItems(writer, case, name)).side()
    return _ArrayRules(writer, case, name, _ContainsItems(writer, case)).side()


def _only(case: ValueCase, place: int) -> tuple[bool | None, ...]:
    return tuple(True if i == place else None for i in range(len(case.contained)))


def _with(term: Term, case: ValueCase, signs: tuple[bool | None, ...]) -> Term:
    literals = list(term)
    for sign, one in zip(signs, case.contained, strict=False):
        if sign is not None:
            literals.append(SchemaLiteral(one.literal.node, one.literal.fits is sign))
    return term_of(literals)


class _ContainsItems:
    """Items, and how many of them fit schemas: a state is these counts."""

    def __init__(self, writer: GrammarRules, case: ValueCase) -> None:
        self._writer = writer
        self._case = case
        self.start: Any = (0,) * len(case.contained)
        self.is_free = not case.contained

    def is_done(self, state: Any) -> bool:
        """Whether an array may end."""
        return all(count >= one.least for count, one in zip(state, self._case.contained, strict=True))

    def items(self, term: Term, state: Any) -> Iterator[tuple[str, Any]]:
        """The rules of items that may come, and the states then."""
        choices: list[Sequence[bool | None]] = []
        for count, one in zip(state, self._case.contained, strict=True):
            if one.most is not None:
                choices.append([False] + [True] * (count < one.most))
            else:
                choices.append([None, True] if count < one.least else [None])
        for signs in itertools.product(*choices):
            signed = _with(term, self._case, signs)
            if self._writer.is_dead(signed):
                continue
            pairs = zip(state, signs, self._case.contained, strict=True)
            yield (
                self._writer.value(signed),
                tuple(min(n + 1, max(one.least, one.most or 0)) if sign else n for n, sign, one in pairs),
            )


class _UniqueItems:
    """Items that differ: a state is which classes there were, or the last one."""

    is_free = False

    def __init__(self, writer: GrammarRules, case: ValueCase, name: str) -> None:
        self._writer = writer
        self._pointer = case.where()
        self._name = name
        if case.contained:
            refuse(f"{self._pointer}/contains", "contains is not supported beside uniqueItems")
        self._count = 0
        self._classes: dict[Any, list[tuple[Any, str]]] = {}
        terms = writer.terms
        places = terms.places(case)
        self._is_even = places == 0
        self._keys: dict[Any, int] = {}
        ordered = self._of(terms.item(case, None)) if self._is_even else []
        self._any_order = len(ordered) <= _MOST_IN_ANY_ORDER
        self.start: Any = () if self._any_order else -1

    def is_done(self, state: Any) -> bool:
        """Whether an array may end."""
        return True

    def items(self, term: Term, state: Any) -> Iterator[tuple[str, Any]]:
        """The rules of items that may come, and the states then."""
        rules = self._of(term)
        if self._any_order:
            for place, rule in rules:
                if place not in state:
                    yield rule, tuple(sorted((*state, place)))
            return
        later = [(place, rule) for place, rule in rules if place > state]
        for place, rule in later:
            yield rule, place

    def _of(self, term: Term) -> list[tuple[int, str]]:
        """The classes of a term's values, by numbers that are the same for equal values."""
        key = key_of(term)
        if key not in self._classes:
            by_mark: dict[Any, str] = {}
            for i, case in enumerate(self._writer.cases(term)):
                for mark, rule in self._split(case, (key, i)):
                    by_mark.setdefault(mark, rule)
            self._classes[key] = [
                (self._keys.setdefault(mark, len(self._keys)), rule) for mark, rule in by_mark.items()
            ]
        return self._classes[key]

    def _split(self, case: ValueCase, mark: Any) -> Iterator[tuple[Any, str]]:
        if case.values is not None:
            for value in case.values:
                yield same(value), self._put(constant(value))
        elif not self._is_even:
            return  # it cannot be told from items at other places
        elif case.kind == "string":
            for i, text in enumerate(strings.classes(case.text)):
                self._count += 1
                name = f"{self._name}_k{self._count}"
                for rule, side in strings.rules(text, name, self._pointer).items():
                    self._writer.put(rule, side)
                yield ("string", i) if text.initial else "string", name
        elif case.kind == "number" and case.number.whole and not case.number.excluded:
            yield from self._integers(case)
        else:
            yield case.kind, self._whole(case)

    def _whole(self, case: ValueCase) -> str:
        self._count += 1
        name = f"{self._name}_k{self._count}"
        return self._writer.put(name, self._writer.side(case, name + "_"))

    def _integers(self, case: ValueCase) -> Iterator[tuple[Any, str]]:
        for left in range(_RESIDUES):
            try:
                machine = machines.machine_of(replace(case.number, residue=(_RESIDUES, left)))
            except machines.UnreadNumbers:
                yield "number", self._whole(case)
                return
            if not machine.is_empty:
                name = f"{self._name}_k{self._count}_{left}"
                for rule, side in machines.rules(machine, name).items():
                    self._writer.put(rule, side)
                yield ("number", left), name

    def _put(self, side: str) -> str:
        self._count += 1
        return self._writer.put(f"{self._name}_k{self._count}", side)


class _ArrayRules:
    """The rules of one array."""

    def __init__(
        self, writer: GrammarRules, case: ValueCase, name: str, kind: _ContainsItems | _UniqueItems
    ) -> None:
        self._writer = writer
        self._case = case
        self._name = name
        self._kind = kind
        terms = writer.terms
        self._terms = [terms.item(case, place) for place in range(terms.places(case))]
        self._rest = terms.item(case, None)
        # behind items that are named one by one there are none, unless a keyword speaks of them
        self._is_closed = not self._rest and bool(self._terms) and case.least <= len(self._terms)
        self._is_closed &= not any(layer.rest for layer in case.layers) and not case.contained
        self._states: dict[Any, str] = {}
        self._todo: list[Any] = []
        if case.most is not None:
            self._cap = case.most
        else:
            self._cap = max(case.least, len(self._terms))

    def side(self) -> str:
        """The right side of a rule."""
        start = self._state(0, self._kind.start)
        rows: dict[Any, list[tuple[str, Any]]] = {}
        while self._todo:
            state = self._todo.pop()
            rows[state] = list(self._alternatives(*state))
        alive = _alive(rows)
        if (0, self._kind.start) not in alive:
            refuse(self._case.where(), "no array that can be written fits the schema")
        for state in alive:
            sides = [
                f"{text} {self._states[to] if to else ''}"
                for text, to in rows[state]
                if not to or to in alive
            ]
            self._writer.put(self._states[state], " | ".join(sides))
        return f'"[" {start} "]"'

    def _state(self, at: int, inner: Any) -> str:
        state = (at, inner)
        if state not in self._states:
            if len(self._states) > _MOST_STATES:
                refuse(self._case.where(), "its items leave too much open")
            self._states[state] = f"{self._name}_{len(self._states)}"
            self._todo.append(state)
        return self._states[state]

    def _alternatives(self, at: int, inner: Any) -> Iterator[tuple[str, Any]]:
        """Returns the possible continuations, and the state after each; None: the end."""
        comma, case = "" if at == 0 else '"," ', self._case
        if self._kind.is_free and at >= len(self._terms):
            yield self._free(at), None
            return
        if at >= case.least and self._kind.is_done(inner):
            yield '""', None
        if case.most is not None and at >= case.most:
            return
        term = self._terms[at] if at < len(self._terms) else self._rest
        if self._writer.is_dead(term) or (self._is_closed and at >= len(self._terms)):
            return
        for rule, following in self._kind.items(term, inner):
            to = (at + 1 if self._case.most is not None else min(at + 1, max(1, self._cap)), following)
            self._state(*to)
            yield f"{comma}{rule}", to

    def _free(self, at: int) -> str:
        """Items of which nothing is said but how many, behind `at` others."""
        least, most = max(0, self._case.least - at), None if self._case.most is None else self._case.most - at
        if most == 0 or self._is_closed or self._writer.is_dead(self._rest):
            return '""'
        rule = self._writer.value(self._rest)
        more = self._writer.put(f"{self._name}_more", f'"," {rule}')
        if at:
            return f"{more}{{{least},{'' if most is None else most}}}" + ("" if least else ' | ""')
        times = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        return f"{rule} {more}{times}" + ("" if least else ' | ""')


def _alive(rows: dict[Any, list[tuple[str, Any]]]) -> set[Any]:
    """The states from which an array can end."""
    alive: set[Any] = set()
    grows = True
    while grows:
        more = {
            s for s, row in rows.items() if s not in alive and any(not to or to in alive for _, to in row)
        }
        alive |= more
        grows = bool(more)
    return alive
