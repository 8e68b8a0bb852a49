"""Rules of JSON values, made rules of the same values as Python's literals.

What these rules let through, Python reads as the value that JSON would have.
"""

from __future__ import annotations

import json
import re
from typing import Any

from eyas.common.errors import InvalidRequest

_VALUE = re.compile(r'[{\["]|(?:true|false|null)\Z')  # a constant that Python may write otherwise


def numbers() -> dict[str, str]:
    """Rules by name: numbers that a float can hold."""
    return {"basic_number": '"-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+\\-]? [0-9]{1,2})?'}


def constant(text: str) -> str:
    """A constant of JSON as a literal; other text stays. Raises InvalidRequest if Python cannot write it."""
    if not _VALUE.match(text):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text  # a bracket or a quote by itself
    return literal(value)


def literal(value: Any) -> str:
    """A JSON value as a literal; its strings are in double quotes, without characters that need an escape.

    Raises InvalidRequest for text with half a surrogate pair, and for numbers that are none.
    """
    match value:
        case None | bool():
            return str(value)
        case list():
            return f"[{', '.join(map(literal, value))}]"
        case dict():
            return "{" + ", ".join(f"{literal(key)}: {literal(part)}" for key, part in value.items()) + "}"
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        raise InvalidRequest("a value of it cannot be written in Python", param="grammar") from None
    return text
