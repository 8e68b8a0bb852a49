"""Values of a parsed JSON object, by their kind: whole numbers, finite numbers, switches, lists, objects.

Nothing is converted that says something else: 2.5 is no whole number, "64" is no number, and `true` is not 1.
Where there is a default, null means it. What is required and is not there is a KeyError, and what is of
another kind or out of all bounds a ValueError that names the field, the value and what is allowed.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Mapping
from typing import Any

Raw = Mapping[str, Any]

MOST = 2**31 - 1
"""Of a whole number: sizes and ids are 32 bits wide in tables and kernels."""


def whole(raw: Raw, name: str, default: int | None = None, *, least: int = 0, most: int = MOST) -> int:
    """A whole number from `least` to `most`; written as 2.0 it is 2."""
    value = _there(raw, name, default)
    return whole_number(name, value, least, most)


def whole_number(name: str, value: Any, least: int = 0, most: int = MOST) -> int:
    """The value as one; `name`: what it is, for the error."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(_float(value))
    if not number or value != int(value):
        raise ValueError(f"{name} {said(value)} must be a whole number from {least} to {most}")
    if value < least:
        raise ValueError(f"{name} {said(value)} must be {least} or more")
    if value > most:
        raise ValueError(f"{name} {said(value)} must be {most} or less")
    return int(value)


def number(raw: Raw, name: str, default: float | None = None, *, within: str = "") -> float:
    """A finite number. `within`: the field whose object this is, for the error."""
    value = _there(raw, name, default)
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(converted := _float(value))
    ):
        return converted
    raise ValueError(f"{f'{within} {name}'.strip()} {said(value)} must be a finite number")


def switch(raw: Raw, name: str, default: bool) -> bool:
    """true or false."""
    value = _there(raw, name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} {said(value)} must be true or false")
    return value


def wholes(raw: Raw, name: str, least: int = 0, most: int = MOST) -> tuple[int, ...]:
    """A list of whole numbers; () where it is not there."""
    value = _there(raw, name, [])
    if not isinstance(value, list):
        raise ValueError(f"{name} {said(value)} must be a list")
    return tuple(whole_number(f"an entry of {name},", each, least, most) for each in value)


def numbers(raw: Raw, name: str) -> tuple[float, ...]:
    """A list of finite numbers."""
    value = raw[name]
    if not isinstance(value, list):
        raise ValueError(f"{name} {said(value)} must be a list")
    return tuple(number({name: each}, name) for each in value)


def words(raw: Raw, name: str) -> tuple[str, ...]:
    """A list of strings; () where it is not there."""
    value = _there(raw, name, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{name} {said(value)} must be a list of strings")
    return tuple(value)


def section(raw: Raw, name: str) -> Raw:
    """An object; an empty one where it is not there."""
    value = _there(raw, name, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} {said(value)} must be an object")
    return value


def said(value: Any) -> str:
    """A value for an error: as much of it as a sentence bears."""
    return reprlib.repr(value)


def _there(raw: Raw, name: str, default: Any) -> Any:
    value = raw[name] if default is None else raw.get(name)
    return default if value is None and default is not None else value


def _float(value: float) -> float:
    """Infinity for a whole number that is larger than any float."""
    return float(value) if abs(value) <= sys.float_info.max else math.inf
