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
    """The constraints of a number: bounds, whether it is whole (None: either), its multiples and those that
    it must not have, and excluded values.
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
        """Adds bounds (`least`, `most`, `above`, `below`)."""
        narrowed = self
        for name, new in bounds.items():
            old = getattr(self, name)
            choose = max if name in ("least", "above") else min
            said: dict[str, Any] = {name: new if old is None else choose(old, new)}
            narrowed = replace(narrowed, **said)
        return narrowed

    @property
    def is_free(self) -> bool:
        """Whether nothing is said but whether it is whole."""
        return replace(self, whole=None) == NumberConstraints()


NAMES = {"minimum": "least", "maximum": "most", "exclusiveMinimum": "above", "exclusiveMaximum": "below"}


def said(node: SchemaNode) -> NumberConstraints:
    """Reads the schema's constraints of numbers."""
    schema, bounds = node.schema, NumberConstraints()
    for keyword, name in NAMES.items():
        if keyword in schema:
            bounds = bounds.within(**{name: exactly(schema[keyword])})
    if schema.get("format") in _SIZED:
        least, most = _SIZED[schema["format"]]
        bounds = replace(bounds.within(least=Fraction(least), most=Fraction(most)), whole=True)
    if "multipleOf" in schema:
        bounds = replace(bounds, multiples=(exactly(schema["multipleOf"]),))
    return bounds


def both(one: NumberConstraints, other: NumberConstraints) -> NumberConstraints:
    """Joins the constraints of both."""
    bounds = {name: getattr(other, name) for name in NAMES.values() if getattr(other, name) is not None}
    return replace(
        one.within(**bounds),
        whole=one.whole if other.whole is None else other.whole,
        multiples=(*one.multiples, *other.multiples),
    )


def fits(node: SchemaNode, value: float) -> bool:
    """Whether the number is what the schema says of numbers."""
    number, bounds = exactly(value), said(node)
    return not (
        (bounds.least is not None and number < bounds.least)
        or (bounds.most is not None and number > bounds.most)
        or (bounds.above is not None and number <= bounds.above)
        or (bounds.below is not None and number >= bounds.below)
        or (bounds.whole and number.denominator != 1)
        or any(number % multiple for multiple in bounds.multiples)
    )
