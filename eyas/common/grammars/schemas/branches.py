"""The values of one type that a schema allows, as cases: each says all of the type's keywords at once.

What several schemas say of a value is a term: schemas that it fits, and schemas that it does not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from eyas.common.grammars.schemas.document import SchemaNode
from eyas.common.grammars.schemas.numbers import NumberConstraints
from eyas.common.grammars.schemas.texts import StringRules
from eyas.common.grammars.schemas.values import same


class SchemaLiteral(NamedTuple):
    """A schema that a value fits, or (False) does not."""

    node: SchemaNode
    fits: bool = True


Term = tuple[SchemaLiteral, ...]
"""The schemas that a value fits and does not fit, each once. Empty: anything."""
Scopes = tuple[int, ...]
"""Places in a case's list of scopes."""


class EmptyCase(Exception):
    """The error of a case without values."""


@dataclass
class SchemaScope:
    """A schema that speaks of what its parts did not look at, and the layers that are its parts."""

    node: SchemaNode
    layers: list[SchemaLayer]


@dataclass
class SchemaLayer:
    """One schema's constraints on an object's properties or on an array's items."""

    node: SchemaNode
    first: list[SchemaNode] = field(default_factory=list)
    rest: SchemaNode | None = None


@dataclass
class ContainsCount:
    """How many items fit a schema, or do not."""

    literal: SchemaLiteral
    least: int
    most: int | None


@dataclass
class ValueCase:
    """Values of one type: `values` if they are few, else what the type's keywords say."""

    kind: str
    literals: list[SchemaLiteral] = field(default_factory=list)
    values: list[Any] | None = None
    number: NumberConstraints = NumberConstraints()
    text: StringRules = StringRules()
    least: int = 0
    most: int | None = None
    unique: bool = False
    layers: list[SchemaLayer] = field(default_factory=list)
    scopes: list[SchemaScope] = field(default_factory=list)
    contained: list[ContainsCount] = field(default_factory=list)
    required: dict[str, None] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    extra: dict[str, list[SchemaLiteral]] = field(default_factory=dict)
    names: list[SchemaLiteral] = field(default_factory=list)
    # how it was made
    todo: list[tuple[SchemaNode, Scopes]] = field(default_factory=list)
    splits: list[CaseSplit] = field(default_factory=list)
    denied: list[SchemaNode] = field(default_factory=list)
    seen: set[Any] = field(default_factory=set)
    is_typed: bool = False
    implied: set[str] = field(default_factory=set)
    may_leave: bool = False

    def where(self, *keywords: str) -> str:
        """A JSON pointer to the first of these keywords that speaks of it; else to what does."""
        for literal in self.literals:
            for keyword in keywords:
                if isinstance(literal.node.schema, dict) and keyword in literal.node.schema:
                    return f"{literal.node.pointer}/{keyword}"
        return self.literals[0].node.pointer if self.literals else "#"

    def copy(self) -> ValueCase:
        """One that can go another way."""
        copied = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list | dict | set):
                setattr(copied, name, copy.copy(value))
        copied.scopes = [SchemaScope(scope.node, list(scope.layers)) for scope in self.scopes]
        copied.extra = {name: list(literals) for name, literals in self.extra.items()}
        return copied

    def assume(self, node: SchemaNode, scopes: Scopes = ()) -> None:
        """Values fit this schema too."""
        if node.schema is False:
            raise EmptyCase
        if node.schema is not True:
            self.todo.append((node, scopes))

    def deny(self, node: SchemaNode) -> None:
        """Values do not fit this schema."""
        if node.schema is True or (id(node), True) in self.seen:
            raise EmptyCase
        if node.schema is not False and (id(node), False) not in self.seen:
            self.seen.add((id(node), False))
            self.literals.append(SchemaLiteral(node, False))
            self.denied.append(node)

    def among(self, values: list[Any]) -> None:
        """Values are some of these."""
        if self.values is not None:
            known = {same(value) for value in values}
            values = [value for value in self.values if same(value) in known]
        self.values = values
        if not values:
            raise EmptyCase

    def count(self, least: int, most: int | None) -> None:
        """Bounds the number of items or properties."""
        self.least = max(self.least, least)
        if most is not None:
            self.most = most if self.most is None else min(self.most, most)
        if self.most is not None and self.least > self.most:
            raise EmptyCase

    def require(self, name: str, literal: SchemaLiteral | None = None) -> None:
        """The property is there, and is that."""
        self.required[name] = None
        if literal is not None:
            self.extra.setdefault(name, []).append(literal)
        if name in self.absent:
            raise EmptyCase

    def lack(self, name: str) -> None:
        """The property is not there."""
        self.absent.add(name)
        if name in self.required:
            raise EmptyCase

    def bound(self, **bounds: Any) -> None:
        """The number is within these."""
        self.number = self.number.within(**bounds)

    def exclude_number(self, value: Any) -> None:
        """The number is another one."""
        self.number = replace(self.number, excluded=(*self.number.excluded, value))

    def say(self, **said: Any) -> None:
        """Adds constraints on the number or the text."""
        if self.kind == "number":
            self.number = replace(self.number, **said)
        else:
            self.text = replace(self.text, **said)
            if self.text.is_empty:
                raise EmptyCase


Fact = Callable[[ValueCase], None]
"""A function that narrows a case. It may raise EmptyCase."""


class CaseSplit(NamedTuple):
    """Alternatives, one of which is so: each is a list of facts, made when it is needed."""

    alternatives: Callable[[], Iterator[list[Fact]]]
    may_leave: bool  # an alternative that cannot be written is left out


def fits(node: SchemaNode, scopes: Scopes = ()) -> Fact:
    """The value fits the schema."""
    return lambda case: case.assume(node, scopes)


def fits_not(node: SchemaNode) -> Fact:
    """The value does not fit the schema."""
    return lambda case: case.deny(node)
