"""References inside a JSON schema, and whether the parts of a `oneOf` exclude each other."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

from eyas.common.errors import InvalidRequest

_LONGEST_CHAIN = 32


def resolve(root: Any, schema: dict[str, Any], pointer: str) -> Any:
    """Follows the references of `schema`. Raises InvalidRequest for one that leads nowhere, or round."""
    for _ in range(_LONGEST_CHAIN):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        schema = _target(root, schema["$ref"], pointer)
    raise InvalidRequest(f"at {pointer[:200]}/$ref: the references go round", param="grammar")


def _target(root: Any, reference: Any, pointer: str) -> Any:
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        message = f"at {pointer[:200]}/$ref: only references into the same schema are supported (#/...)"
        raise InvalidRequest(message, param="grammar")
    target = root
    for part in unquote(reference).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        try:
            target = target[int(part)] if isinstance(target, list) else target[part]
        except (LookupError, ValueError, TypeError):
            message = f"at {pointer[:200]}/$ref: {reference[:200]} does not exist"
            raise InvalidRequest(message, param="grammar") from None
    return target


def type_of_value(value: Any) -> set[str]:
    """The names of the types that a JSON value has: a whole number is an integer and a number."""
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case None:
            return {"null"}
        case list():
            return {"array"}
    return {"object"}


def disjoint(root: Any, parts: list[Any], pointer: str) -> bool:
    """Does no value fit two of these schemas, as can be seen from their types, values or a required tag?"""
    resolved = [resolve(root, part, pointer) for part in parts]
    return all(_exclude(root, one, other) for i, one in enumerate(resolved) for other in resolved[i + 1 :])


def _exclude(root: Any, one: Any, other: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    mine, theirs = _types(one), _types(other)
    if mine and theirs and not mine & theirs:
        return True
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not values & others
    for name in set(one.get("required", ())) & set(other.get("required", ())):
        tags = [_values(resolve(root, part.get("properties", {}).get(name), "#")) for part in (one, other)]
        if tags[0] is not None and tags[1] is not None and not tags[0] & tags[1]:
            return True
    return False


def _types(schema: dict[str, Any]) -> set[str]:
    """Returns the schema's types; numbers count as integers too, because some are. Empty: unknown."""
    if (values := _values(schema)) is not None:
        return set().union(*(type_of_value(json.loads(value)) for value in values))
    given = schema.get("type", [])
    types = {given} if isinstance(given, str) else set(given)
    return types | ({"integer"} if "number" in types else set())


def _values(schema: Any) -> set[str] | None:
    """The only values that it allows, as JSON; None: not known."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return {json.dumps(schema["const"], sort_keys=True)}
    if isinstance(schema.get("enum"), list):
        return {json.dumps(value, sort_keys=True) for value in schema["enum"]}
    return None
