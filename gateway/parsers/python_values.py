"""Values that models write in Python: literals, and JSON's three words among them.

Nothing else is evaluated.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from gateway.parsers.source import MalformedOutput

MAX_LITERAL = 1 << 16  # characters
_JSON_NAMES = {"true": True, "false": False, "null": None}  # models mix the two languages
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


def literal(text: str) -> Any:
    """The value of a literal, whose strings may span lines. Raises MalformedOutput for anything else."""
    if len(text) > MAX_LITERAL:
        raise MalformedOutput
    try:
        return _value(ast.parse(f"({_STRING.sub(_on_a_line, text)}\n)", mode="eval").body)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise MalformedOutput from None


def as_json(value: Any) -> str:
    """The value as JSON. Raises MalformedOutput for what JSON does not have."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # half a surrogate pair is no text
    except (ValueError, TypeError, RecursionError):
        raise MalformedOutput from None
    return text


def _on_a_line(string: re.Match[str]) -> str:
    return string.group().replace("\\\n", "\n").replace("\n", "\\n").replace("\r", "\\r")


def _value(node: ast.expr) -> Any:
    """The value of a literal. Raises ValueError for anything else."""
    match node:
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            if None in keys:
                raise ValueError
            return {
                ast.literal_eval(key): _value(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
        case _:
            return ast.literal_eval(node)
