"""The rules of bodies beyond the types of their fields, as JSON schema for /openapi.json.

Data and functions of it: null means absent, and rules over several fields. The bodies' own validators refuse
what breaks them.
"""

from __future__ import annotations

from typing import Any

Rule = dict[str, Any]
_OUTSIDE = ("title", "description", "default")  # what is said of a field, not of its value


def or_null(field: Rule) -> Rule:
    """The schema of a field that may be null: it is then absent."""
    annotations = {name: part for name, part in field.items() if name in _OUTSIDE}
    kind = {name: part for name, part in field.items() if name not in _OUTSIDE}
    kinds = kind["anyOf"] if list(kind) == ["anyOf"] else [kind]
    if not kind or {"type": "null"} in kinds:
        return field
    return {"anyOf": [*kinds, {"type": "null"}], **annotations}


def given(name: str, kind: Rule | None = None) -> Rule:
    """A field is there, not null, and of this kind."""
    return {"required": [name], "properties": {name: kind or {"not": {"type": "null"}}}}


def exactly_one(*names: str) -> Rule:
    """One of the fields is given, and the others are not."""
    return {"oneOf": [given(name) for name in names]}


def at_most_one(*names: str) -> Rule:
    """The rule that at most one of the fields is given."""
    both = [[a, b] for i, a in enumerate(names) for b in names[i + 1 :]]
    return {"not": {"anyOf": [{"allOf": [given(a), given(b)]} for a, b in both]}}


def needs(when: Rule, then: Rule) -> Rule:
    """The rule that `then` holds where `when` does."""
    return {"if": when, "then": then}
