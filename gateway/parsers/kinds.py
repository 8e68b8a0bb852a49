"""The kinds of parameters whose values stand bare: a reader and a grammar must agree on them.

It takes any schema, valid or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from eyas.common.errors import InvalidRequest
from eyas.common.grammars.schema_branches import resolve

BRANCHES = ("anyOf", "oneOf", "allOf")
ANY = "any"
_FORMS = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_NAMES = {form: form for form in _FORMS.values()} | {"integer": "number"}
_MOST_BRANCHES = 200  # schemas that are looked at to tell one parameter's kind


class ValueKind(NamedTuple):
    """How a bare value is read. `forms`: the types of JSON that it may have; `ANY` is one of any other."""

    forms: frozenset[str]

    @property
    def is_text(self) -> bool:
        """Whether it is text, whatever it looks like."""
        return self.forms == {"string"}

    @property
    def is_optional(self) -> bool:
        """Whether it is text, or null where it says null alone."""
        return self.forms == {"string", "null"}

    @property
    def is_json(self) -> bool:
        """Whether it is JSON if it can be read as such, else text."""
        return not self.is_text and not self.is_optional

    def names(self, value: Any) -> bool:
        """Whether the schema names the type of the value, as Python has it."""
        return form_of(value) in self.forms

    def takes(self, value: Any) -> bool:
        """Whether the value is rather read as what it is than as text."""
        return ANY in self.forms or "string" not in self.forms or self.names(value)


class ParameterKinds(NamedTuple):
    """The kinds of a tool's parameters, by name, and of all others."""

    named: Mapping[str, ValueKind]
    others: ValueKind

    def of(self, title: str) -> ValueKind:
        """The kind of the parameter `title`."""
        return self.named.get(title, self.others)


def kinds_of(schema: Mapping[str, Any]) -> ParameterKinds:
    """Returns the kinds of a tool's parameters by its schema."""
    named: dict[str, set[str]] = {}
    others: set[str] = set()
    for part in objects_of(schema, schema):
        properties = part.get("properties")
        for title, value in properties.items() if isinstance(properties, Mapping) else ():
            named.setdefault(title, set()).update(_forms(value, schema, set()))
        if isinstance(part.get("additionalProperties"), Mapping):
            others |= _forms(part["additionalProperties"], schema, set())
    return ParameterKinds(
        {title: ValueKind(frozenset(forms)) for title, forms in named.items()},
        ValueKind(frozenset(others or {ANY})),
    )


def objects_of(schema: Any, root: Any, seen: set[int] | None = None) -> Iterator[Mapping[str, Any]]:
    """The schemas, one of which an object follows that `schema` describes."""
    seen = set() if seen is None else seen
    target = followed(schema, root)
    if not isinstance(target, Mapping) or id(target) in seen or len(seen) > _MOST_BRANCHES:
        return
    seen.add(id(target))
    branches = [name for name in BRANCHES if isinstance(target.get(name), list)]
    if not branches:
        yield target
    for name in branches:
        for branch in target[name]:
            yield from objects_of(branch, root, seen)


def followed(schema: Any, root: Any) -> Any:
    """Returns the schema with references followed; None if one leads nowhere."""
    try:
        return resolve(root, schema, "#")
    except InvalidRequest:
        return None


def _forms(schema: Any, root: Any, seen: set[int]) -> set[str]:
    """The types of JSON that the values have."""
    target = followed(schema, root)
    if not isinstance(target, Mapping) or len(seen) > _MOST_BRANCHES:
        return {ANY}
    if id(target) in seen:
        return set()
    seen.add(id(target))
    if "type" in target:
        types = target["type"]
        names = types if isinstance(types, list) else [types]
        return {_NAMES.get(name, ANY) if isinstance(name, str) else ANY for name in names}
    if "enum" in target or "const" in target:
        values = target["enum"] if isinstance(target.get("enum"), list) else [target.get("const")]
        return {form_of(value) for value in values}
    for name in BRANCHES:
        if isinstance(target.get(name), list):
            return set().union(*(_forms(branch, root, seen) for branch in target[name]))
    return {ANY}


def form_of(value: Any) -> str:
    """The type of JSON of a value, as Python has it."""
    return _FORMS.get(type(value), ANY)
