"""Of which kind a parameter's value is, where values stand bare: what a reader and a grammar must agree on.

It knows what a tool's schema says about each parameter. It takes any schema, right or wrong, and refuses to
judge it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from eyas.common.errors import InvalidRequest
from eyas.common.schema_branches import resolve

BRANCHES = ("anyOf", "oneOf", "allOf")
_MOST_BRANCHES = 200  # schemas that are looked at to tell one parameter's kind


class Kind(enum.Enum):
    """How a bare value is read."""

    TEXT = "text"
    OPTIONAL = "text, or null where it says null alone"
    JSON = "JSON if it can be read as such, else text"


class Kinds(NamedTuple):
    """The kinds of a tool's parameters, by name, and of all others."""

    named: Mapping[str, Kind]
    others: Kind

    def of(self, title: str) -> Kind:
        """The kind of the parameter `title`."""
        return self.named.get(title, self.others)


def kinds_of(schema: Mapping[str, Any]) -> Kinds:
    """What the schema of a tool's parameters says about each."""
    named: dict[str, set[str]] = {}
    others: set[str] = set()
    for part in objects_of(schema, schema):
        properties = part.get("properties")
        for title, value in properties.items() if isinstance(properties, Mapping) else ():
            named.setdefault(title, set()).update(_forms(value, schema, set()))
        if isinstance(part.get("additionalProperties"), Mapping):
            others |= _forms(part["additionalProperties"], schema, set())
    return Kinds({title: _kind(forms) for title, forms in named.items()}, _kind(others))


def objects_of(schema: Any, root: Any, seen: set[int] | None = None) -> Iterator[Mapping[str, Any]]:
    """The schemas, one of which an object follows that `schema` describes."""
    seen = set() if seen is None else seen
    found = followed(schema, root)
    if not isinstance(found, Mapping) or id(found) in seen or len(seen) > _MOST_BRANCHES:
        return
    seen.add(id(found))
    branches = [name for name in BRANCHES if isinstance(found.get(name), list)]
    if not branches:
        yield found
    for name in branches:
        for branch in found[name]:
            yield from objects_of(branch, root, seen)


def followed(schema: Any, root: Any) -> Any:
    """What the schema refers to, if that is all that it says and it is there."""
    try:
        return resolve(root, schema, "#")
    except InvalidRequest:
        return None


def _kind(forms: set[str]) -> Kind:
    if forms == {"string"}:
        return Kind.TEXT
    return Kind.OPTIONAL if forms == {"string", "null"} else Kind.JSON


def _forms(schema: Any, root: Any, seen: set[int]) -> set[str]:
    """Which of string, null and any other the values are."""
    found = followed(schema, root)
    if not isinstance(found, Mapping) or len(seen) > _MOST_BRANCHES:
        return {"any"}
    if id(found) in seen:
        return set()
    seen.add(id(found))
    if "type" in found:
        types = found["type"]
        names = types if isinstance(types, list) else [types]
        return {name if name in ("string", "null") else "any" for name in names}
    if "enum" in found or "const" in found:
        values = found["enum"] if isinstance(found.get("enum"), list) else [found.get("const")]
        return {_form(value) for value in values}
    for name in BRANCHES:
        if isinstance(found.get(name), list):
            return set().union(*(_forms(branch, root, seen) for branch in found[name]))
    return {"any"}


def _form(value: Any) -> str:
    if value is None:
        return "null"
    return "string" if isinstance(value, str) else "any"
