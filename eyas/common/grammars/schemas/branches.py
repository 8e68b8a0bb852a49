"""What values of one type a schema allows, as cases: each says all of the type's keywords at once.

What several schemas say of a value is a term: schemas that it fits, and schemas that it does not. This file
refuses to know how values are written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from eyas.common.grammars.schemas.document import SchemaNode
from eyas.common.grammars.schemas.numbers import Number
from eyas.common.grammars.schemas.texts import StringRules
from eyas.common.grammars.schemas.values import same


class Literal(NamedTuple):
    """A schema that a value fits, or (False) does not."""

    node: SchemaNode
    fits: bool = True


Term = tuple[Literal, ...]
"""What a value fits and does not, each said once. Empty: anything."""
Scopes = tuple[int, ...]
"""Places in a case's list of scopes."""


class Dead(Exception):
    """No value is in this case."""


@dataclass
class Scope:
    """A schema that speaks of what its parts did not look at, and the layers that are its parts."""

    node: SchemaNode
    layers: list[Layer]


@dataclass
class Layer:
    """What one schema says of an object's properties or of an array's items."""

    node: SchemaNode
    first: list[SchemaNode] = field(default_factory=list)
    rest: SchemaNode | None = None


@dataclass
class Contained:
    """How many items fit a schema, or do not."""

    literal: Literal
    least: int
    most: int | None


@dataclass
class Case:
    """Values of one type: `values` if they are few, else what the type's keywords say."""

    kind: str
    literals: list[Literal] = field(default_factory=list)
    values: list[Any] | None = None
    number: Number = Number()
    text: StringRules = StringRules()
    least: int = 0
    most: int | None = None
    unique: bool = False
    layers: list[Layer] = field(default_factory=list)
    scopes: list[Scope] = field(default_factory=list)
    contained: list[Contained] = field(default_factory=list)
    required: dict[str, None] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    extra: dict[str, list[Literal]] = field(default_factory=dict)
    names: list[Literal] = field(default_factory=list)
    # how it was made
    todo: list[tuple[SchemaNode, Scopes]] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)
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

    def copy(self) -> Case:
        """One that can go another way."""
        found = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list | dict | set):
                setattr(found, name, copy.copy(value))
        found.scopes = [Scope(scope.node, list(scope.layers)) for scope in self.scopes]
        found.extra = {name: list(literals) for name, literals in self.extra.items()}
        return found

    def assume(self, node: SchemaNode, scopes: Scopes = ()) -> None:
        """Values fit this schema too."""
        if node.schema is False:
            raise Dead
        if node.schema is not True:
            self.todo.append((node, scopes))

    def deny(self, node: SchemaNode) -> None:
        """Values do not fit this schema."""
        if node.schema is True or (id(node), True) in self.seen:
            raise Dead
        if node.schema is not False and (id(node), False) not in self.seen:
            self.seen.add((id(node), False))
            self.literals.append(Literal(node, False))
            self.denied.append(node)

    def among(self, values: list[Any]) -> None:
        """Values are some of these."""
        if self.values is not None:
            known = {same(value) for value in values}
            values = [value for value in self.values if same(value) in known]
        self.values = values
        if not values:
            raise Dead

    def count(self, least: int, most: int | None) -> None:
        """So many items or properties."""
        self.least = max(self.least, least)
        if most is not None:
            self.most = most if self.most is None else min(self.most, most)
        if self.most is not None and self.least > self.most:
            raise Dead

    def require(self, name: str, literal: Literal | None = None) -> None:
        """The property is there, and is that."""
        self.required[name] = None
        if literal is not None:
            self.extra.setdefault(name, []).append(literal)
        if name in self.absent:
            raise Dead

    def lack(self, name: str) -> None:
        """The property is not there."""
        self.absent.add(name)
        if name in self.required:
            raise Dead

    def bound(self, **bounds: Any) -> None:
        """The number is within these."""
        self.number = self.number.within(**bounds)

    def exclude_number(self, value: Any) -> None:
        """The number is another one."""
        self.number = replace(self.number, excluded=(*self.number.excluded, value))

    def say(self, **said: Any) -> None:
        """Something else of the number or the text."""
        if self.kind == "number":
            self.number = replace(self.number, **said)
        else:
            self.text = replace(self.text, **said)
            if self.text.is_empty:
                raise Dead


Fact = Callable[[Case], None]
"""What makes a case a smaller one. It may raise Dead."""


class Split(NamedTuple):
    """Alternatives, one of which is so: each is a list of facts, made when it is needed."""

    alternatives: Callable[[], Iterator[list[Fact]]]
    may_leave: bool  # an alternative that cannot be written is left out


def fits(node: SchemaNode, scopes: Scopes = ()) -> Fact:
    """The value fits the schema."""
    return lambda case: case.assume(node, scopes)


def fits_not(node: SchemaNode) -> Fact:
    """The value does not fit the schema."""
    return lambda case: case.deny(node)
