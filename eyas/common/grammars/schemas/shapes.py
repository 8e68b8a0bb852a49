"""Checks that the keywords of a schema are well formed and supported."""

from __future__ import annotations

import math
from typing import Any

from eyas.common.grammars.schemas.refusals import refuse

TYPES = frozenset("null boolean integer number string array object".split())
COUNTS = frozenset(
    "minLength maxLength minItems maxItems minProperties maxProperties minContains maxContains".split()
)
BOUNDS = frozenset("minimum maximum exclusiveMinimum exclusiveMaximum".split())
_SCHEMAS = (
    *("not", "if", "then", "else", "contains", "additionalItems", "additionalProperties"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
_LISTS = ("prefixItems", "enum", "anyOf", "oneOf", "allOf")
_OBJECTS = ("properties", "patternProperties", "dependentSchemas", "dependentRequired", "dependencies")
_TEXTS = ("pattern", "format", "$ref", "contentEncoding", "contentMediaType")
_NOT_SUPPORTED = {
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), "use $ref"),
    **dict.fromkeys(("contentSchema",), "text that holds JSON cannot be held to"),
    **dict.fromkeys(("extends", "disallow", "divisibleBy"), "it is of an old version of JSON Schema"),
}
KEYWORDS = frozenset(
    (
        *("type", "enum", "const", "uniqueItems", "required", "items", "multipleOf", *COUNTS, *BOUNDS),
        *(*_SCHEMAS, *_LISTS, *_OBJECTS, *_TEXTS, *_NOT_SUPPORTED),
    )
)
"""The keywords that constrain values."""


def check(schema: Any, pointer: str) -> None:
    """Raises InvalidRequest for what is malformed or not supported in this schema; its parts are not read."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        refuse(pointer, "a schema must be an object, true or false")
    for name, value in schema.items():
        if name in _NOT_SUPPORTED:
            refuse(f"{pointer}/{name}", f"{name} is not supported: {_NOT_SUPPORTED[name]}")
        if (reason := _wrong(name, value)) is not None:
            refuse(f"{pointer}/{name}", reason)


def _wrong(name: str, value: Any) -> str | None:
    """Why the value cannot stand at the keyword."""
    if name in _TEXTS and not isinstance(value, str):
        return f"{name} must be a text"
    if name in _SCHEMAS and not isinstance(value, dict | bool):
        return "a schema must be an object, true or false"
    if name == "items" and not isinstance(value, dict | bool | list):
        return "items must be a schema, or a list of schemas"
    if name in _OBJECTS and not isinstance(value, dict):
        return f"{name} must be an object"
    if name in _LISTS and not isinstance(value, list):
        return f"{name} must be a list"
    if name in _LISTS and not value:
        return f"{name} must be a list that is not empty"
    if name in COUNTS and not _is_count(value):
        return f"{name} must be a whole number, 0 or more"
    if name in BOUNDS and not _is_number(value):
        return f"{name} must be a number"
    if name == "multipleOf" and not (_is_number(value) and value > 0):
        return "multipleOf must be a number above 0"
    if name == "contentMediaType" and "json" in value:
        return "text that holds JSON cannot be held to"
    if name == "uniqueItems" and not isinstance(value, bool):
        return "uniqueItems must be true or false"
    if name == "required" and not _are_names(value):
        return "required must be a list of names"
    if name == "dependentRequired" and not all(map(_are_names, value.values())):
        return "dependentRequired must have lists of names"
    return _wrong_type(value) if name == "type" else None


def _wrong_type(given: Any) -> str | None:
    types = [given] if isinstance(given, str) else given
    if not isinstance(types, list) or not types or not all(isinstance(one, str) for one in types):
        return "type must be a name, or a list of names"
    unknown = [name for name in types if name not in TYPES]
    return f"{unknown[0][:40]!r} is not a type" if unknown else None


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)
