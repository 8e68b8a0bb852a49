"""What of JSON Schema an output can be held to, and the same schema with nothing left to a default.

xgrammar follows some keywords more weakly than they are written, and says so nowhere a caller would look.
`exact` refuses those by name, with a JSON pointer, so that what is accepted is followed to the letter. It
may narrow a schema (properties that are not declared are not written), and never widens one. This file knows
JSON Schema, and refuses to know tokens. The walk does not recurse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NoReturn

from eyas.common.errors import InvalidRequest
from eyas.common.json_rules import mark
from eyas.common.regex_syntax import Unheld
from eyas.common.schema_branches import disjoint, resolve, type_of_value
from eyas.common.string_rules import JSON, Text, rules_of
from eyas.common.text_formats import text_of

MAX_DEPTH = 32
MAX_ENUM_VALUES = 1000
MAX_PROPERTIES = 2000
MAX_MULTIPLE = 1024

_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties"),
    },
}
_TYPES = {*_OF_TYPE, "integer", "boolean", "null"}
_INSTEAD = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")  # one of these says all
_UNSUPPORTED = {
    *("not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies", "contains"),
    *("minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties", "additionalItems"),
    *("$dynamicRef", "$recursiveRef", "contentSchema"),
}
_BOUNDS = _OF_TYPE["number"] - {"multipleOf"}
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_CONSTRAINTS = {"type", *_INSTEAD}.union(*_OF_TYPE.values())
_SHAPES: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("properties", "patternProperties"), (dict, "an object")),
    **dict.fromkeys(("required", "prefixItems", "enum", "anyOf", "oneOf", "allOf"), (list, "a list")),
    "format": (str, "a text"),
}
_STEP = Fraction(1, 10**6)  # of a bounded number: xgrammar writes six decimals
_OVERLAP = (
    "oneOf is only supported where a type, or a required property's const, tells its parts from each other: "
    "anyOf may be what is meant"
)

Schema = dict[str, Any]


def exact(root: Any, pointer: str = "#") -> Any:
    """The schema with its defaults written out; `root` is changed. `pointer` is where it stands.

    Raises InvalidRequest with a JSON pointer for what cannot be followed exactly, and for what is too large.
    """
    return _Walk(root, pointer).run()


class _Walk:
    """One walk over a schema: what is still to be looked at, and how much there has been."""

    def __init__(self, root: Any, pointer: str) -> None:
        self._root = root
        self._todo: list[tuple[Any, str, int]] = [(root, pointer, 0)]
        self._seen: set[int] = set()
        self._one_ofs: list[tuple[Schema, str]] = []
        self._patterned: list[Schema] = []
        self._values = self._properties = 0

    def run(self) -> Any:
        while self._todo:
            schema, pointer, depth = self._todo.pop()
            if isinstance(schema, bool) or id(schema) in self._seen:
                continue
            if not isinstance(schema, dict):
                refuse(pointer, "a schema must be an object, true or false")
            if depth > MAX_DEPTH:
                refuse(pointer, f"schemas are nested more than {MAX_DEPTH} deep")
            self._seen.add(id(schema))
            self._look(schema, pointer)
            self._todo += [(below, at, depth + 1) for below, at in _below(schema, pointer)]
            if "$ref" in schema:  # a definition is only read if something refers to it
                self._todo.append((resolve(self._root, schema, pointer), schema["$ref"], depth))
        for schema, pointer in self._one_ofs:  # whose parts were looked at by now
            if not disjoint(self._root, schema["oneOf"], pointer):
                message = (
                    "oneOf is only supported where a type, or a required property's const, tells its parts"
                )
                refuse(f"{pointer}/oneOf", f"{message} from each other: anyOf may be what is meant")
        for schema in self._patterned:  # pointers name them until here
            of_pattern = schema["patternProperties"]
            schema["patternProperties"] = {mark(Text((name,))): part for name, part in of_pattern.items()}
        return self._root

    def _look(self, schema: Schema, pointer: str) -> None:
        for name in schema:
            if name in _UNSUPPORTED:
                refuse(f"{pointer}/{name}", f"{name} is not supported")
            if name in _SHAPES and not isinstance(schema[name], _SHAPES[name][0]):
                refuse(f"{pointer}/{name}", f"{name} must be {_SHAPES[name][1]}")
        instead = [name for name in _INSTEAD if name in schema]
        if instead:
            self._look_instead(schema, pointer, instead[0])
            return
        types = _types(schema, pointer)
        _look_at_counts(schema, pointer)
        if "string" in types:
            _look_at_string(schema, pointer)
        if {"number", "integer"} & types:
            _look_at_number(schema, pointer, types)
        if "array" in types:
            _look_at_array(schema, pointer)
        if "object" in types:
            self._properties += len(schema.get("properties", ()))
            if self._properties > MAX_PROPERTIES:
                refuse(pointer, f"the schema has more than {MAX_PROPERTIES} properties")
            _look_at_object(schema, pointer)
            if schema.get("patternProperties"):
                self._patterned.append(schema)

    def _look_instead(self, schema: Schema, pointer: str, name: str) -> None:
        """A schema that says all by one keyword. What stands beside it would not be followed."""
        beside = _CONSTRAINTS.intersection(schema) - {name}
        if name in ("enum", "const"):
            beside -= {"type"}
            self._look_at_values(schema, pointer, name)
        if beside:
            refuse(f"{pointer}/{min(beside)}", f"{min(beside)} is not supported beside {name}")
        if name == "allOf" and len(_list(schema, name, pointer)) > 1:
            refuse(f"{pointer}/allOf", "allOf of several schemas is not supported")
        if name == "oneOf" and _list(schema, name, pointer):
            self._one_ofs.append((schema, pointer))

    def _look_at_values(self, schema: Schema, pointer: str, name: str) -> None:
        values = _list(schema, "enum", pointer) if name == "enum" else [schema["const"]]
        self._values += len(values)
        if self._values > MAX_ENUM_VALUES:
            refuse(
                f"{pointer}/{name}", f"the schema has more than {MAX_ENUM_VALUES} values in enum and const"
            )
        if "type" not in schema:
            return
        types = _types(schema, pointer)
        fitting = [value for value in values if type_of_value(value) & types]
        if not fitting:
            refuse(f"{pointer}/{name}", "no value has the type")
        del schema["type"]
        if name == "enum":
            schema["enum"] = fitting


def refuse(pointer: str, reason: str) -> NoReturn:
    """Raises InvalidRequest for the place in the schema."""
    raise InvalidRequest(f"at {pointer[:200]}: {reason}", param="grammar")


def _below(schema: Schema, pointer: str) -> Iterator[tuple[Any, str]]:
    """The schemas that stand in this one, and where."""
    for name in ("items", "additionalProperties", "propertyNames"):
        if name in schema:
            yield schema[name], f"{pointer}/{name}"
    for name in ("prefixItems", "anyOf", "oneOf", "allOf"):
        for i, part in enumerate(schema.get(name, ())):
            yield part, f"{pointer}/{name}/{i}"
    for name in ("properties", "patternProperties"):
        for key, part in schema.get(name, {}).items():
            yield part, f"{pointer}/{name}/{key.replace('~', '~0').replace('/', '~1')}"


def _types(schema: Schema, pointer: str) -> set[str]:
    """The types that it allows, written into it if its keywords alone tell them. Empty: any."""
    if "type" in schema:
        given = schema["type"]
        types = [given] if isinstance(given, str) else given
        if not isinstance(types, list) or not types or not all(isinstance(one, str) for one in types):
            refuse(f"{pointer}/type", "type must be a name, or a list of names")
        for name in types:
            if name not in _TYPES:
                refuse(f"{pointer}/type", f"{name[:40]!r} is not a type")
        return set(types)
    implied = [name for name, keywords in _OF_TYPE.items() if keywords & schema.keys()]
    if len(implied) > 1:
        refuse(pointer, f"a type is needed: the keywords are those of {' and '.join(implied)}")
    if implied:
        schema["type"] = implied[0]
    return set(implied)


def _look_at_counts(schema: Schema, pointer: str) -> None:
    for name in _COUNTS & schema.keys():
        count = schema[name]
        if isinstance(count, float) and count.is_integer():
            count = schema[name] = int(count)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            refuse(f"{pointer}/{name}", f"{name} must be a whole number, 0 or more")


def _look_at_string(schema: Schema, pointer: str) -> None:
    """Makes a pattern, a format and lengths one pattern, which is told again as rules."""
    told = [name for name in ("pattern", "format", "minLength", "maxLength") if name in schema]
    if not told:
        return
    try:
        text = text_of(schema)
        rules_of(text, JSON, "text")
    except Unheld as reason:
        named = next((name for name in told if name in str(reason)), told[0])
        refuse(f"{pointer}/{named}", f"the {named} is not supported: {reason}")
    for name in told:
        del schema[name]
    schema["pattern"] = mark(text)


def _look_at_number(schema: Schema, pointer: str, types: set[str]) -> None:
    multiple = schema.get("multipleOf", 1)
    if "number" in types and multiple != 1:
        refuse(f"{pointer}/multipleOf", "multipleOf is not supported of numbers that may have fractions")
    if not isinstance(multiple, int) or not 1 <= multiple <= MAX_MULTIPLE:
        refuse(f"{pointer}/multipleOf", f"multipleOf must be a whole number from 1 to {MAX_MULTIPLE}")
    if "multipleOf" in schema and (bounds := _BOUNDS & schema.keys()):
        refuse(f"{pointer}/{min(bounds)}", f"{min(bounds)} is not supported beside multipleOf")
    for name in _BOUNDS & schema.keys():
        bound = schema[name]
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound):
            refuse(f"{pointer}/{name}", f"{name} must be a number")
    if not _has_room(schema):
        refuse(pointer, "no number of six decimals lies between the bounds")


def _has_room(schema: Schema) -> bool:
    """Whether a number that is written in steps of _STEP lies within its bounds."""
    at = {name: Fraction(str(schema[name])) / _STEP for name in _BOUNDS & schema.keys()}
    least = [math.ceil(at["minimum"])] if "minimum" in at else []
    least += [math.floor(at["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in at else []
    most = [math.floor(at["maximum"])] if "maximum" in at else []
    most += [math.ceil(at["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in at else []
    return not least or not most or max(least) <= min(most)


def _look_at_array(schema: Schema, pointer: str) -> None:
    if schema.get("uniqueItems"):
        refuse(f"{pointer}/uniqueItems", "uniqueItems is not supported")
    if "prefixItems" in schema:
        _list(schema, "prefixItems", pointer)
    schema.setdefault("items", "prefixItems" not in schema)


def _look_at_object(schema: Schema, pointer: str) -> None:
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name in schema.get("required", []):
        if not isinstance(name, str) or name not in properties:
            refuse(f"{pointer}/required", f"{str(name)[:40]!r} is required, but properties has no such name")
    named = [name for name in ("properties", "patternProperties", "propertyNames") if schema.get(name)]
    if len(named) > 1:
        refuse(f"{pointer}/{named[1]}", f"{named[1]} is not supported beside {named[0]}")
    if len(patterns) > 1:
        refuse(f"{pointer}/patternProperties", "several patternProperties are not supported")
    for pattern in patterns:
        try:
            rules_of(Text((pattern,)), JSON, "text")
        except Unheld as reason:
            refuse(f"{pointer}/patternProperties", f"the pattern {pattern[:40]!r} is not supported: {reason}")
    for name in ("minProperties", "maxProperties"):
        if name in schema and named not in ([], ["properties"]):
            refuse(f"{pointer}/{name}", f"{name} is not supported beside {named[0]}")
    schema.setdefault("additionalProperties", named in ([], ["propertyNames"]))


def _list(schema: Schema, name: str, pointer: str) -> list[Any]:
    found = schema[name]
    if not isinstance(found, list) or not found:
        refuse(f"{pointer}/{name}", f"{name} must be a list that is not empty")
    return found
