"""The parameters of tools, where a format writes them one by one: which there are, and what bounds them.

It knows JSON schemas, and refuses by name what such a format cannot hold to. It refuses to know how values
are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from eyas.common.errors import InvalidRequest
from eyas.common.json_schema import refuse
from gateway.parsers.kinds import followed, objects_of

OTHER_NAMES = "[A-Za-z_][A-Za-z0-9_]{0,40}"
"""A pattern of names that parameters may have which a schema does not name."""
_NOT_OF_ALL = ("patternProperties", "propertyNames", "minProperties", "maxProperties")
_ROOT = "parameters of the tool"  # where definitions keep what references refer to


class Parameters(NamedTuple):
    """What an object may hold: schemas by name, in their order; `required` of them; `others`: the schema of
    as many as one likes that have other names, None: there are none.
    """

    named: Mapping[str, Any]
    required: frozenset[str]
    others: Any


def parameters_of(schema: Mapping[str, Any]) -> list[Parameters]:
    """What the arguments of a tool may hold: one of these. The schema is one that can be followed exactly.

    Raises InvalidRequest for what no format can hold to that writes parameters one by one.
    """
    pointer = "#"
    branches = list(objects_of(schema, schema))
    for part in branches:
        if part.get("type", "object") != "object":
            refuse(pointer, "the parameters of a tool must be an object")
        for name in _NOT_OF_ALL:
            if name in part:
                refuse(f"{pointer}/{name}", f"{name} is not supported of a tool's parameters in this format")
    found = [_parameters(part) for part in branches]
    if not found or (len(found) > 1 and any(part.others is not None and not part.named for part in found)):
        refuse(pointer, "parameters are only supported as an object with properties, or anyOf such objects")
    return found


def _parameters(part: Mapping[str, Any]) -> Parameters:
    others = part.get("additionalProperties", True)
    if others is True:
        others = {}
    named = part.get("properties", {})
    return Parameters(
        named, frozenset(part.get("required", ())), None if others is False or named else others
    )


def standing(schema: Any, root: Any) -> Any:
    """The schema by itself: what it refers to in `root` comes with it."""
    if not _refers(schema):
        return schema
    alone = _renamed(schema)
    definitions = {_ROOT: _renamed(root)}
    if not isinstance(alone, dict):
        return alone
    return {**alone, "$defs": {**alone.get("$defs", {}), **definitions}}


def _refers(schema: Any) -> bool:
    if isinstance(schema, dict):
        return isinstance(schema.get("$ref"), str) or any(_refers(part) for part in schema.values())
    return isinstance(schema, list) and any(_refers(part) for part in schema)


def _renamed(schema: Any) -> Any:
    """The same with references to where the root is kept."""
    if isinstance(schema, list):
        return [_renamed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: f"#/$defs/{_ROOT}{part[1:]}"
        if name == "$ref" and isinstance(part, str)
        else part
        if name in ("enum", "const", "default", "examples")
        else _renamed(part)
        for name, part in schema.items()
    }


def constraint(schema: Any, root: Any) -> Mapping[str, Any]:
    """What a schema says once its references are followed; an empty one says nothing."""
    found = followed(schema, root)
    return found if isinstance(found, Mapping) else {}


def unheld(title: str, reason: str) -> NoReturn:
    """Raises InvalidRequest: the parameter cannot be held to."""
    raise InvalidRequest(f"at #/properties/{title[:100]}: {reason}", param="tools")
