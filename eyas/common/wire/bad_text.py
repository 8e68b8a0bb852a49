"""Finds a text in a protobuf message that is no UTF-8, such as half of a surrogate pair.

Protobuf says of such a message only that it cannot be parsed. This file reads its wire format as far as it
takes to name the field.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

MOST_FIELDS = 20_000  # that are looked at: some ten milliseconds
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def bad_text(descriptor: Descriptor, data: bytes) -> str | None:
    """The field, as messages[0].content; None where there is none, or the bytes are no such message."""
    try:
        return _place(descriptor, memoryview(data), "", itertools.count(1))
    except (IndexError, ValueError):
        return None


def _place(descriptor: Any, data: memoryview, path: str, seen: Iterator[int]) -> str | None:
    """Raises IndexError or ValueError for bytes that are cut or of another kind, or for too many fields."""
    at, counts = 0, Counter[int]()
    while at < len(data):
        if next(seen) > MOST_FIELDS:
            raise ValueError("too many fields")
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind != _BYTES:
            at = _past(data, at, kind)
            continue
        size, at = _varint(data, at)
        part, at = data[at : at + size], at + size
        field = descriptor.fields_by_number.get(number)
        if field is None:
            continue
        name = f"{path}{field.name}[{counts[number]}]" if field.is_repeated else path + field.name
        counts[number] += 1
        if field.type == FieldDescriptor.TYPE_STRING and not _is_text(part):
            return name
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            place = _place(field.message_type, part, f"{name}.", seen)
            if place is not None:
                return place
    return None


def _past(data: memoryview, at: int, kind: int) -> int:
    """Returns the end of the value at `at`."""
    if kind == _VARINT:
        return _varint(data, at)[1]
    if kind not in (_FIXED64, _FIXED32):
        raise ValueError("groups are not read")
    return at + (8 if kind == _FIXED64 else 4)


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        byte = data[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise ValueError("a number has too many bytes")


def _is_text(data: memoryview) -> bool:
    try:
        str(data, "utf-8")
    except UnicodeDecodeError:
        return False
    return True
