"""JSON values: which are equal, of which type each is, and numbers as they are written."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any


def same(value: Any) -> str:
    """A text that equal JSON values have in common: 1 and 1.0 are equal, true and 1 are not."""
    match value:
        case float() if value.is_integer():
            return str(int(value))
        case bool() | None | str():
            return json.dumps(value)
        case int():
            return str(value)
        case list():
            return f"[{','.join(map(same, value))}]"
        case dict():
            parts = sorted(f"{json.dumps(key)}:{same(part)}" for key, part in value.items())
            return f"{{{','.join(parts)}}}"
    return json.dumps(value)


def kind_of(value: Any) -> str:
    """The type of a JSON value; whole numbers are numbers."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def is_whole(value: Any) -> bool:
    """Whether it is an integer, as JSON Schema means it."""
    return kind_of(value) == "number" and (isinstance(value, int) or value.is_integer())


def exactly(number: float) -> Fraction:
    """The number as it is written."""
    return Fraction(number) if isinstance(number, int) else Fraction(repr(number))
