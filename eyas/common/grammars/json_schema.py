"""Translates JSON Schema into the rules of a grammar, as far as an output can be held to it.

What is accepted is followed to the letter: every text that the rules let through is JSON that fits the
schema. They may let through less (properties come in the order of the schema). What cannot be followed is
refused with a JSON pointer into the schema. What nothing can be (`terms`) is left out, and each term's rule
is written once.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

from eyas.common.grammars.schemas import machines, members, sequences, strings
from eyas.common.grammars.schemas.basics import ANY, BASICS, constant
from eyas.common.grammars.schemas.branches import SchemaLiteral, Term, ValueCase
from eyas.common.grammars.schemas.document import SchemaDocument, refuse
from eyas.common.grammars.schemas.terms import OutOfTime, SchemaTerms, key_of, term_of

MAX_RULES = 20_000


def rules_of(schema: Any, pointer: str = "#") -> str:
    """Rules (GBNF) of the JSON values that fit the schema. `pointer` is where it stands.

    Raises InvalidRequest with a JSON pointer for what cannot be followed, and for what is too large.
    """
    terms, term = _read(schema, pointer)
    return RuleWriter(terms).of(term)


def types_of(schema: Any, until: float = inf) -> set[str] | None:
    """The types of the values that fit the schema; whole numbers are numbers. `until`: by the thread's clock
    of its processor; None: it would take longer. Raises InvalidRequest.
    """
    terms, term = _read(schema, "#")
    terms.until = until
    try:
        return {case.kind for case in terms.cases(term)}
    except OutOfTime:
        return None


def _read(schema: Any, pointer: str) -> tuple[SchemaTerms, tuple[SchemaLiteral, ...]]:
    document = SchemaDocument(schema, pointer)
    document.read_all()
    return SchemaTerms(document), term_of([SchemaLiteral(document.root)])


class RuleWriter:
    """Writes the rules of one document."""

    def __init__(self, terms: SchemaTerms) -> None:
        self.terms = terms
        self._names: dict[Any, str] = {}
        self._todo: list[tuple[str, Term]] = []
        self._lines: dict[str, str] = dict(BASICS)
        self._dead: set[Any] = set()

    def of(self, term: Term) -> str:
        """The rules; `root` writes the values of the term."""
        self._find_dead(term)
        if key_of(term) in self._dead:
            refuse(self.terms.document.root.pointer, "no value that can be written fits the schema")
        self.put("root", self.value(term))
        while self._todo:
            name, one = self._todo.pop()
            sides = [self.side(case, f"{name}_{i}") for i, case in enumerate(self._living(one))]
            self.put(name, " | ".join(sides))
        return "\n".join(f"{name} ::= {side}" for name, side in self._lines.items())

    def put(self, name: str, side: str) -> str:
        """Adds a rule; its name."""
        self._lines[name] = side
        if len(self._lines) > MAX_RULES:
            refuse(self.terms.document.root.pointer, f"it needs more than {MAX_RULES} rules")
        return name

    def value(self, term: Term) -> str:
        """The name of the rule for the values of a term."""
        if not term:
            return ANY
        key = key_of(term)
        if key not in self._names:
            self._names[key] = f"v{len(self._names)}"
            self._todo.append((self._names[key], term))
        return self._names[key]

    def is_dead(self, term: Term) -> bool:
        """Whether no value of the term can be written."""
        return bool(term) and key_of(term) in self._dead

    def cases(self, term: Term) -> list[ValueCase]:
        """The term's cases that have values; of a term that says nothing, none."""
        return list(self._living(term))

    def side(self, case: ValueCase, name: str) -> str:
        """The right side of a rule for the values of a case; rules that it needs begin with `name`."""
        if case.values is not None:
            return " | ".join(map(constant, case.values))
        match case.kind:
            case "number":
                return self._number(case, name)
            case "string":
                place = case.where("pattern", "format", "maxLength", "minLength")
                for rule, side in strings.rules(case.text, name, place).items():
                    self.put(rule, side)
                return name
            case "array":
                return sequences.side(self, case, name)
        return members.side(self, case, name)

    def _number(self, case: ValueCase, name: str) -> str:
        if case.number.is_free and case.number.whole is not False:
            return "basic_integer" if case.number.whole else "basic_number"
        try:
            machine = machines.machine_of(case.number)
        except machines.UnreadNumbers as reason:
            refuse(case.where("multipleOf", "minimum", "maximum"), str(reason))
        for rule, side in machines.rules(machine, name).items():
            self.put(rule, side)
        return name

    # --- what has no values ------------------------------------------------------------------------------

    def _find_dead(self, root: Term) -> None:
        """Looks for terms that no finite value fits."""
        reached: dict[Any, Term] = {key_of(root): root}
        todo = [root]
        while todo:
            for case in self.terms.cases(todo.pop()):
                for term in self._parts(case):
                    if term and key_of(term) not in reached:
                        reached[key_of(term)] = term
                        todo.append(term)
        self._dead = set(reached)
        grows = True
        while grows:
            living = [key for key in self._dead if any(map(self._lives, self.terms.cases(reached[key])))]
            self._dead -= set(living)
            grows = bool(living)

    def _living(self, term: Term) -> Iterator[ValueCase]:
        return (case for case in self.terms.cases(term) if self._lives(case))

    def _parts(self, case: ValueCase) -> Iterator[Term]:
        if case.values is None and case.kind == "array":
            yield from sequences.parts(self.terms, case)
        if case.values is None and case.kind == "object":
            yield from members.parts(self.terms, case)

    def _lives(self, case: ValueCase) -> bool:
        if case.values is not None:
            return True
        match case.kind:
            case "number":
                try:
                    return not machines.machine_of(case.number).is_empty
                except machines.UnreadNumbers:
                    return True  # it is refused by name where it is written
            case "string":
                return not strings.is_empty(case.text)
            case "array":
                return sequences.lives(self, case)
        return members.lives(self, case)
