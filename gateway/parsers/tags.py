"""Grammars of calls, in the notation that grammars of text with structured parts have (structural tags)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Format = dict[str, Any]
Mark = Callable[[str], Format]
"""The format of a marker: the text of its name, or its token where the vocabulary has one for it alone."""
Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schemas that calls' arguments follow, by name of the tool."""


def text(value: str) -> Format:
    """The format of a literal text."""
    return {"type": "const_string", "value": value}


def quoted(value: str) -> str:
    """The text as a JSON string."""
    return json.dumps(value, ensure_ascii=False)


def sequence(*elements: Format) -> Format:
    """One after the other."""
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Sequence[Format]) -> Format:
    """One of them."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def optional(content: Format) -> Format:
    """The format of this or nothing."""
    return {"type": "optional", "content": content}


def repeated(item: Format, between: Format | None, many: bool) -> Format:
    """One, or if `many` one after the other, with `between` in between if given."""
    if not many:
        return item
    following = item if between is None else sequence(between, item)
    return sequence(item, {"type": "star", "content": following})


def arguments(schema: Mapping[str, Any]) -> Format:
    """A JSON value that the schema describes."""
    return {"type": "json_schema", "json_schema": dict(schema)}


def call_objects(tools: Schemas, key: str) -> Format:
    """`{"name": ..., key: {...}}`, as `calls.call_object` reads it."""
    return either(
        [
            sequence(
                text(f'{{"name": {quoted(name)}, "{key}": '),
                arguments(schema),
                text("}"),
            )
            for name, schema in tools.items()
        ]
    )
