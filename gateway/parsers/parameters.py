"""The parameters of tools, where a format writes them one by one: their kinds, and what bounds them.

A reader and a grammar must agree on the kinds of those whose values stand bare: any schema has them, valid or
not. What such a format cannot hold to is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote, unquote

from eyas.common.errors import InvalidRequest
from eyas.common.grammars.schemas.document import KEYWORDS, mapped, refuse

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
OTHER_NAMES = "[A-Za-z_][A-Za-z0-9_]{0,40}"
"""A pattern of names that parameters may have which a schema does not name."""
_OF_OBJECTS = frozenset(("type", "properties", "required", "additionalProperties"))
_OF_TEXTS = frozenset(("type", "enum", "const", "pattern", "format", "minLength", "maxLength"))
_ROOT = "parameters of the tool"  # where definitions keep what references refer to
_LONGEST_CHAIN = 32


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

    @property
    def may_be_text(self) -> bool:
        """Whether it may be text, if it cannot be read as JSON."""
        return "string" in self.forms or ANY in self.forms

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


class ObjectParameters(NamedTuple):
    """The properties of an object: schemas by name, in their order; `required` of them; `others`: the schema
    of as many as one likes that have other names, None: there are none.
    """

    named: Mapping[str, Any]
    required: frozenset[str]
    others: Any


def parameters_of(schema: Mapping[str, Any]) -> list[ObjectParameters]:
    """The alternative forms of a tool's arguments. The schema is one that can be followed exactly.

    Raises InvalidRequest for what no format can hold to that writes parameters one by one.
    """
    pointer = "#"
    _only(schema, schema, _OF_OBJECTS, pointer)
    branches = list(objects_of(schema, schema))
    for part in branches:
        if part.get("type", "object") != "object":
            refuse(pointer, "the parameters of a tool must be an object")
        for name in part.get("required", ()):
            if name not in part.get("properties", ()):
                refuse(f"{pointer}/required", f"{name[:40]!r} is required, but properties has no such name")
    alternatives = [_parameters(part) for part in branches]
    if not alternatives or (
        len(alternatives) > 1 and any(part.others is not None and not part.named for part in alternatives)
    ):
        refuse(pointer, "parameters are only supported as an object with properties, or anyOf such objects")
    return alternatives


def unfollowed(tool: str) -> str:
    """How an error about the tool's parameters begins."""
    return f"the tool {tool} cannot be followed: "


def only_text(schema: Any, root: Any, pointer: str) -> None:
    """Raises InvalidRequest for what no format can hold to that writes text as it stands."""
    _only(schema, root, _OF_TEXTS, pointer)


def _only(schema: Any, root: Any, names: frozenset[str], pointer: str) -> None:
    """Refuses keywords of JSON Schema but these, in the schema and its alternatives."""
    todo, seen = [schema], set[int]()
    while todo:
        part = todo.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        said = KEYWORDS & part.keys()
        alternatives = said & {"$ref", *BRANCHES}
        wrong = said - alternatives - ({"type"} if alternatives else names)
        if wrong or len(alternatives) > 1:
            name = min(wrong or alternatives)
            refuse(f"{pointer}/{name}", f"{name} is not supported there in the model's format of calls")
        for name in alternatives - {"$ref"}:
            if name == "allOf" and len(part[name]) > 1:
                refuse(
                    f"{pointer}/allOf",
                    "allOf of several schemas is not supported in the model's format of calls",
                )
            if name == "oneOf" and not disjoint(root, part[name], pointer):
                refuse(
                    f"{pointer}/oneOf",
                    "oneOf needs a constant that tells its parts apart in the model's format",
                )
            todo += part[name]
        if "$ref" in part:
            todo.append(followed(part, root))


def _parameters(part: Mapping[str, Any]) -> ObjectParameters:
    others = part.get("additionalProperties", True)
    if others is True:
        others = {}
    named = part.get("properties", {})
    return ObjectParameters(
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
    """Returns the schema with its references to the root moved to the root's new place."""
    return mapped(schema, _with_new_reference)


def _with_new_reference(schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return schema
    return {**schema, "$ref": f"#/$defs/{quote(_ROOT)}{reference[1:]}"}


def constraint(schema: Any, root: Any) -> Mapping[str, Any]:
    """Returns the schema with references followed; an empty one allows everything."""
    target = followed(schema, root)
    return target if isinstance(target, Mapping) else {}


def unheld(title: str, reason: str) -> NoReturn:
    """Raises InvalidRequest: the parameter cannot be held to."""
    raise InvalidRequest(f"at #/properties/{title[:100]}: {reason}", param="tools")


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
