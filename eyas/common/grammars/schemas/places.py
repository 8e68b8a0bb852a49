"""The places of a schema that hold schemas, and those that hold names, values and other things."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_ONE = (
    *("not", "if", "then", "else", "contains", "items", "additionalItems", "additionalProperties"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties", "contentSchema"),
)
_SEVERAL = ("items", "prefixItems", "anyOf", "oneOf", "allOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


def below(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas that stand in this one, with their pointers from it (`/properties/a`)."""
    if not isinstance(schema, dict):
        return
    for name in _ONE:
        if name in schema and not isinstance(schema[name], list):
            yield f"/{name}", schema[name]
    for name in _SEVERAL:
        if isinstance(schema.get(name), list):
            for i, part in enumerate(schema[name]):
                yield f"/{name}/{i}", part
    for name in _NAMED:
        if isinstance(schema.get(name), dict):
            for key, part in schema[name].items():
                if not isinstance(part, list):  # names of a dependency
                    yield f"/{name}/{escaped(key)}", part


def mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The schema with `change` made to it and to every schema in it; names and values stay."""
    if not isinstance(schema, dict):
        return schema
    copied = dict(schema)
    for name in _ONE:
        if isinstance(copied.get(name), dict):
            copied[name] = mapped(copied[name], change)
    for name in _SEVERAL:
        if isinstance(copied.get(name), list):
            copied[name] = [mapped(part, change) for part in copied[name]]
    for name in _NAMED:
        if isinstance(copied.get(name), dict):
            copied[name] = {key: mapped(part, change) for key, part in copied[name].items()}
    return change(copied)


def escaped(key: str) -> str:
    """The key as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")
