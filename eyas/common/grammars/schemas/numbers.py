"""The constraints of a schema on numbers: bounds, multiples, and what they are not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from eyas.common.grammars.schemas.document import SchemaNode
from eyas.common.grammars.schemas.values import exactly

_SIZED = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}
FORMATS = frozenset({*_SIZED, "float", "double"})
"""Formats of numbers."""


@dataclass(frozen=True)
class NumberConstraints:
    """What is said of a number: bounds, whether it is whole (None: either), what it is a multiple of and what
    not, and what it is not.
    """

    least: Fraction | None = None
    most: Fraction | None = None
    above: Fraction | None = None
    below: Fraction | None = None
    whole: bool | None = None
    multiples: tuple[Fraction, ...] = ()
    others: tuple[Fraction, ...] = ()  # of which it is no multiple
    excluded: tuple[Fraction, ...] = ()
    residue: tuple[int, int] | None = None  # (modulus, remainder) of a whole number

    def within(self, **bounds: Fraction) -> NumberConstraints:
        """The same, with these bounds too (`least`, `most`, `above`, `below`)."""
        found = self
        for name, new in bounds.items():
            old = getattr(self, name)
            choose = max if name in ("least", "above") else min
            said: dict[str, Any] = {name: new if old is None else choose(old, new)}
            found = replace(found, **said)
        return found

    @property
    def is_free(self) -> bool:
        """Whether nothing is said but whether it is whole."""
        return replace(self, whole=None) == NumberConstraints()


NAMES = {"minimum": "least", "maximum": "most", "exclusiveMinimum": "above", "exclusiveMaximum": "below"}


def said(node: SchemaNode) -> NumberConstraints:
    """What the schema says of numbers."""
    schema, found = node.schema, NumberConstraints()
    for keyword, name in NAMES.items():
        if keyword in schema:
            found = found.within(**{name: exactly(schema[keyword])})
    if schema.get("format") in _SIZED:
        least, most = _SIZED[schema["format"]]
        found = replace(found.within(least=Fraction(least), most=Fraction(most)), whole=True)
    if "multipleOf" in schema:
        found = replace(found, multiples=(exactly(schema["multipleOf"]),))
    return found


def both(one: NumberConstraints, other: NumberConstraints) -> NumberConstraints:
    """What both say."""
    bounds = {name: getattr(other, name) for name in NAMES.values() if getattr(other, name) is not None}
    return replace(
        one.within(**bounds),
        whole=one.whole if other.whole is None else other.whole,
        multiples=(*one.multiples, *other.multiples),
    )


def fits(node: SchemaNode, value: float) -> bool:
    """Whether the number is what the schema says of numbers."""
    number, held = exactly(value), said(node)
    return not (
        (held.least is not None and number < held.least)
        or (held.most is not None and number > held.most)
        or (held.above is not None and number <= held.above)
        or (held.below is not None and number >= held.below)
        or (held.whole and number.denominator != 1)
        or any(number % multiple for multiple in held.multiples)
    )
