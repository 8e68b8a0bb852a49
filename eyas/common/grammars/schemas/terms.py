"""Terms: which cases values of a term are in, and what is said of their parts.

It counts its work, and refuses a schema that needs too much. What an alternative says that cannot be followed
leaves the alternative out, where others are left: an output then is one of these.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from math import inf
from typing import Any

from eyas.common.grammars.schemas import texts
from eyas.common.grammars.schemas.branches import (
    CaseSplit,
    EmptyCase,
    SchemaLayer,
    SchemaLiteral,
    SchemaScope,
    Term,
    ValueCase,
)
from eyas.common.grammars.schemas.document import SchemaDocument, SchemaNode, UnwritableBranch, refuse
from eyas.common.grammars.schemas.judge import SchemaValidator, properties_of
from eyas.common.grammars.schemas.keywords import KeywordReader

KINDS = ("null", "boolean", "number", "string", "array", "object")
MAX_STEPS = 20_000
_MOST_CASES = 500  # of one term
_QUICK = 60  # steps to see that two schemas exclude each other


def term_of(literals: Iterator[SchemaLiteral] | list[SchemaLiteral]) -> Term:
    """The literals, each once, without those that say nothing."""
    distinct: dict[tuple[int, bool], SchemaLiteral] = {}
    for literal in literals:
        if literal.node.schema is not literal.fits and literal.node.schema not in ({}, True):
            distinct[id(literal.node), literal.fits] = literal
        elif literal.node.schema is not literal.fits and not literal.fits:
            distinct[id(literal.node), False] = literal
    return tuple(distinct.values())


class OutOfTime(Exception):
    """The error of terms that took longer than they may."""


class SchemaTerms:
    """The constraints of a document on its values. `finish` raises EmptyCase for a case without values, and
    InvalidRequest for one that no rules can express.
    """

    def __init__(self, document: SchemaDocument) -> None:
        self.document = document
        self.until = inf  # of the thread's processor clock; then `OutOfTime` is raised
        self.judge = SchemaValidator(document, self._look_at_clock)
        self._keywords = KeywordReader(document)
        self._cases: dict[frozenset[tuple[int, bool]], list[ValueCase]] = {}
        self._open: set[frozenset[tuple[int, bool]]] = set()
        self._steps = 0

    def cases(self, term: Term) -> list[ValueCase]:
        """The cases of the term's values. Raises InvalidRequest for what cannot be followed."""
        key = key_of(term)
        if key not in self._cases:
            self._open.add(key)
            try:
                self._cases[key] = self._all(term)
            finally:
                self._open.discard(key)
        return self._cases[key]

    def is_empty(self, term: Term) -> bool:
        """Whether no value fits; one that is being looked at may have some."""
        if not term:
            return False
        if key_of(term) in self._open:
            return False
        return not self.cases(term)

    def _all(self, term: Term) -> list[ValueCase]:
        cases: list[ValueCase] = []
        left: list[UnwritableBranch] = []
        for kind in KINDS:
            first = ValueCase(kind)
            if kind in ("null", "boolean"):
                first.values = [None] if kind == "null" else [False, True]
            try:
                for literal in term:
                    if literal.fits:
                        first.assume(literal.node)
                    else:
                        first.deny(literal.node)
            except EmptyCase:
                continue
            cases += self._spread(first, left)
        if left and all(case.kind == "null" for case in cases):
            raise left[0]
        # keywords without a type mean the types that they speak of, if these are possible
        meant = [case for case in cases if case.is_typed or not case.implied or case.kind in case.implied]
        return meant or cases

    def _spread(self, first: ValueCase, left: list[UnwritableBranch]) -> list[ValueCase]:
        """The cases of one type."""
        settled, todo = list[ValueCase](), [first]
        while todo:
            case = todo.pop()
            self._step(case)
            try:
                self._settle(case)
                if case.values is not None and first.kind not in ("null", "boolean"):
                    case.splits.clear()
                    case.denied.clear()
                if (split := self._next(case)) is None:
                    self.finish(case)
                    settled.append(case)
                    if len(settled) > _MOST_CASES:
                        refuse(case.where(), f"it has more than {_MOST_CASES} cases")
                else:
                    todo += reversed(list(self._taken(case, split, left)))
            except EmptyCase:
                continue
            except UnwritableBranch as error:
                if not case.may_leave:
                    raise
                left.append(error)
        return settled

    def _taken(
        self, case: ValueCase, split: CaseSplit, left: list[UnwritableBranch] | None
    ) -> Iterator[ValueCase]:
        """The cases of each alternative; `left`: what is left out, None: nothing may be."""
        for facts in split.alternatives():
            following = case.copy()
            following.splits.pop()
            following.may_leave |= split.may_leave
            try:
                for fact in facts:
                    fact(following)
            except EmptyCase:
                continue
            except UnwritableBranch as error:
                if left is None or not split.may_leave:
                    raise
                left.append(error)
                continue
            yield following

    def _settle(self, case: ValueCase) -> None:
        """Takes in all that leaves no choice."""
        while case.todo:
            node, scopes = case.todo.pop(0)
            key = (id(node), True, scopes)
            if (id(node), False) in case.seen:
                raise EmptyCase
            if key in case.seen:
                continue
            case.seen |= {key, (id(node), True)}
            case.literals.append(SchemaLiteral(node))
            self._keywords.assume(case, node, scopes)

    def _next(self, case: ValueCase) -> CaseSplit | None:
        """Returns the next open split of the case, if there is one."""
        if case.splits:
            return case.splits[-1]
        while case.denied:
            node = case.denied.pop(0)
            if not self._excludes(case, node):
                split = CaseSplit(partial(self._keywords.denials, case, node), True)
                case.splits.append(split)
                return split
        return None

    def _excludes(self, case: ValueCase, node: SchemaNode) -> bool:
        """Whether no value of the case fits the schema, as can be seen with little work."""
        first = case.copy()
        first.splits.clear()
        first.denied.clear()
        first.seen.discard((id(node), False))
        first.literals.clear()  # one of them holds what is denied
        todo, steps = [first], 0
        try:
            first.assume(node)
            while todo:
                one = todo.pop()
                steps += 1
                self._step(one)
                if steps > _QUICK:
                    return False
                try:
                    self._settle(one)
                    one.denied.clear()
                    if one.splits:
                        todo += self._taken(one, one.splits[-1], None)
                        continue
                    self.finish(one)
                    return False
                except EmptyCase:
                    continue
        except EmptyCase:
            return True
        except UnwritableBranch:
            return False
        return True

    def _step(self, case: ValueCase) -> None:
        self._look_at_clock()
        self._steps += 1
        if self._steps > MAX_STEPS:
            refuse(self.document.root.pointer, "its schemas have too many cases together")

    def _look_at_clock(self) -> None:
        if self.until < inf and time.thread_time() > self.until:
            raise OutOfTime

    # --- a whole case ------------------------------------------------------------------------------------

    def finish(self, case: ValueCase) -> None:
        """Judges few values one by one, and looks for parts that nothing can be. Raises EmptyCase."""
        if case.values is not None:
            case.values = [value for value in case.values if self._is_of(case, value)]
            if not case.values:
                raise EmptyCase
            return
        if case.kind == "object":
            for name in case.required:
                if self.is_empty(self.property(case, name)):
                    raise EmptyCase
        if case.kind == "array":
            for i in range(min(case.least, 1 + max((len(x.first) for x in case.layers), default=0))):
                if self.is_empty(self.item(case, i)):
                    raise EmptyCase

    def _is_of(self, case: ValueCase, value: Any) -> bool:
        if case.kind == "object" and (set(case.required) - set(value) or case.absent & set(value)):
            return False
        return all(self.judge.fits(literal.node, value) is literal.fits for literal in case.literals)

    def property(self, case: ValueCase, name: str) -> Term:
        """Returns the constraints of the property."""
        if name in case.absent or not all(self.judge.fits(x.node, name) is x.fits for x in case.names):
            return (self._nothing(),)
        literals = list(case.extra.get(name, ()))
        for layer in case.layers:
            literals += map(SchemaLiteral, properties_of(self.document, layer.node, name))
        for scope in case.scopes:
            if not any(self._looks_at(scope, layer, name) for layer in scope.layers):
                literals.append(SchemaLiteral(scope.node))
        return term_of(literals)

    def _looks_at(self, scope: SchemaScope, layer: SchemaLayer, name: str) -> bool:
        return self._takes_all(scope, layer) or bool(properties_of(self.document, layer.node, name))

    def _takes_all(self, scope: SchemaScope, layer: SchemaLayer) -> bool:
        """Whether it speaks of whatever its parts did not look at, and is not the one that asks."""
        word = "unevaluatedProperties"
        return word in layer.node.schema and self.document.node(layer.node, word) is not scope.node

    def _nothing(self) -> SchemaLiteral:
        return SchemaLiteral(self.document.nothing)

    def names(self, case: ValueCase) -> list[str]:
        """The properties that are spoken of, in their order."""
        properties: dict[str, None] = {}
        for layer in case.layers:
            properties |= dict.fromkeys(layer.node.schema.get("properties", ()))
        return list(
            properties | case.required | dict.fromkeys(case.extra) | dict.fromkeys(sorted(case.absent))
        )

    def others(self, case: ValueCase, matched: tuple[str, ...]) -> Term:
        """Returns the constraints of unnamed properties whose names match these patterns alone."""
        literals: list[SchemaLiteral] = []
        for layer in case.layers:
            schema = layer.node.schema
            patterns = schema.get("patternProperties", {})
            matching = [p for p in patterns if p in matched]
            literals += [
                SchemaLiteral(self.document.node(layer.node, "patternProperties", p)) for p in matching
            ]
            if not matching and "additionalProperties" in schema:
                literals.append(SchemaLiteral(self.document.node(layer.node, "additionalProperties")))
        for scope in case.scopes:
            if not any(self._looks_at_others(scope, layer, matched) for layer in scope.layers):
                literals.append(SchemaLiteral(scope.node))
        return term_of(literals)

    def _looks_at_others(self, scope: SchemaScope, layer: SchemaLayer, matched: tuple[str, ...]) -> bool:
        schema = layer.node.schema
        if "additionalProperties" in schema or self._takes_all(scope, layer):
            return True
        return any(pattern in matched for pattern in schema.get("patternProperties", ()))

    def patterns(self, case: ValueCase) -> list[str]:
        """The patterns of names that are spoken of."""
        listed = list[str]()
        for layer in case.layers:
            for pattern in layer.node.schema.get("patternProperties", ()):
                texts.simple(pattern, f"{layer.node.pointer}/patternProperties")
                listed.append(pattern)
        return list(dict.fromkeys(listed))

    def item(self, case: ValueCase, place: int | None) -> Term:
        """Returns the constraints of the item at this place (from 0); None: of all items behind the described
        ones.
        """
        literals = [] if place is None else list(case.extra.get(str(place), ()))
        for layer in case.layers:
            if place is not None and place < len(layer.first):
                literals.append(SchemaLiteral(layer.first[place]))
            elif layer.rest is not None:
                literals.append(SchemaLiteral(layer.rest))
        for scope in case.scopes:
            if not any(_reaches(layer, place) for layer in scope.layers):
                literals.append(SchemaLiteral(scope.node))
        return term_of(literals)

    def places(self, case: ValueCase) -> int:
        """How many items are spoken of one by one."""
        spoken = [len(layer.first) for layer in case.layers]
        return max([*spoken, *(int(place) + 1 for place in case.extra)], default=0)


def key_of(term: Term) -> frozenset[tuple[int, bool]]:
    """Returns a key that equal terms share."""
    return frozenset((id(literal.node), literal.fits) for literal in term)


def _reaches(layer: SchemaLayer, place: int | None) -> bool:
    if layer.rest is not None:
        return True
    return place is not None and place < len(layer.first)
