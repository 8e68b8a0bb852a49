"""A JSON schema with its parts by place, what references in it lead to, and whether it is well formed.

Some places of a schema hold schemas, others names, values and other things. Refusals of a schema are
sentences that point into it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from urllib.parse import unquote, urldefrag, urljoin

from eyas.common.errors import InvalidRequest

MAX_DEPTH = 32
MAX_ENUM_VALUES = 1000
MAX_PROPERTIES = 2000
_LONGEST_CHAIN = 32
_OLD = re.compile(r"draft-0[3-7]")  # in which nothing beside $ref counts
_INDEX = re.compile(r"0|[1-9][0-9]*")
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
_ONE = (
    *("not", "if", "then", "else", "contains", "items", "additionalItems", "additionalProperties"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties", "contentSchema"),
)
_SEVERAL = ("items", "prefixItems", "anyOf", "oneOf", "allOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


class SchemaNode:
    """A schema, where it stands, and the address that references in it begin from. Each is there once."""

    __slots__ = ("base", "checked", "old", "pointer", "schema")

    def __init__(self, schema: Any, pointer: str, base: str, old: bool) -> None:
        self.schema = schema
        self.pointer = pointer
        self.base = base
        self.old = old
        self.checked = False

    def refuse(self, keyword: str, reason: str) -> None:
        """Raises InvalidRequest about one of its keywords."""
        refuse(f"{self.pointer}/{keyword}", reason)


class SchemaDocument:
    """All of a schema. Raises InvalidRequest for one that is too deep."""

    def __init__(self, root: Any, pointer: str = "#") -> None:
        self._nodes: dict[int, SchemaNode] = {}
        self._constants = {value: SchemaNode(value, pointer, "", False) for value in (True, False)}
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._at = pointer
        self._values = self._properties = 0
        self.root = self._read(root)

    @property
    def nothing(self) -> SchemaNode:
        """The schema that no value fits."""
        return self._constants[False]

    def node(self, parent: SchemaNode, *path: str | int) -> SchemaNode:
        """The schema at this path inside another one."""
        schema: Any = parent.schema
        for part in path:
            schema = schema[part]
        if isinstance(schema, bool):
            return self._constants[schema]
        entry = self._nodes.get(id(schema))
        if entry is None:
            pointer = "".join(f"/{escaped(str(part))}" for part in path)
            entry = SchemaNode(schema, parent.pointer + pointer, parent.base, parent.old)
            if isinstance(schema, dict):
                self._nodes[id(schema)] = entry
        return self._checked(entry)

    def read_all(self) -> None:
        """Checks every schema that values may have to do with. Raises InvalidRequest for the first that is
        malformed, not supported, or refers to nothing.
        """
        todo, seen = [self.root], set[int]()
        while todo:
            node = todo.pop()
            if not isinstance(node.schema, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            self._checked(node)
            if "$ref" in node.schema:
                todo.append(self.target(node))
                if node.old:
                    continue
            for path, part in below(node.schema):
                if isinstance(part, bool) or path.startswith(("/$defs/", "/definitions/")):
                    continue
                if not isinstance(part, dict):
                    refuse(f"{node.pointer}{path}", "a schema must be an object, true or false")
                todo.append(self._nodes[id(part)])

    def target(self, node: SchemaNode) -> SchemaNode:
        """Returns the target of `$ref`. Raises InvalidRequest for none, another document, or a circle."""
        start = node
        for _ in range(_LONGEST_CHAIN):
            node = self._step(node)
            if not isinstance(node.schema, dict) or "$ref" not in node.schema:
                return self._checked(node)
            if set(node.schema) - {"$ref", "$defs", "definitions", "description", "title"}:
                return self._checked(node)
        refuse(f"{start.pointer}/$ref", "the references go round")

    def _read(self, root: Any) -> SchemaNode:
        """Takes down every schema; it does not recurse."""
        old = isinstance(root, dict) and bool(_OLD.search(str(root.get("$schema", ""))))
        first = SchemaNode(root, self._at, "", old)
        todo: list[tuple[Any, str, str, int]] = [(root, self._at, "", 0)]
        while todo:
            schema, pointer, base, depth = todo.pop()
            if depth > MAX_DEPTH:
                refuse(pointer, f"schemas are nested more than {MAX_DEPTH} deep")
            if not isinstance(schema, dict) or id(schema) in self._nodes:
                continue
            base = self._named(schema, base)
            self._nodes[id(schema)] = SchemaNode(schema, pointer, base, old)
            todo += [(part, pointer + path, base, depth + 1) for path, part in below(schema)]
        return self._checked(self._nodes.get(id(root), first))

    def _named(self, schema: dict[str, Any], base: str) -> str:
        """Takes down what names it has; its own address."""
        name = schema.get("$id")
        if isinstance(name, str) and name and "$ref" not in schema:
            if name.startswith("#"):
                self._anchors[base, name[1:]] = schema
            else:
                base = urldefrag(urljoin(base, name)).url
                self._resources.setdefault(base, schema)
        if isinstance(schema.get("$anchor"), str):
            self._anchors[base, schema["$anchor"]] = schema
        return base

    def _step(self, node: SchemaNode) -> SchemaNode:
        reference = node.schema["$ref"]
        url, fragment = urldefrag(reference)
        url = urldefrag(urljoin(node.base, url)).url if url else node.base
        if url not in self._resources:
            where = "only references into the same schema are supported (#/...)"
            refuse(f"{node.pointer}/$ref", where)
        target, base, pointer = self._resources[url], url, self._at if url == "" else f"{node.pointer}/$ref"
        if fragment and not fragment.startswith("/"):
            target = self._anchors.get((url, unquote(fragment)))
            if target is None:
                refuse(f"{node.pointer}/$ref", f"{reference[:200]} does not exist")
        elif fragment:
            target = self._inside(target, unquote(fragment), node)
            pointer = f"{self._at}{fragment}" if url == "" else pointer
        known = self._nodes.get(id(target))
        if known is None:
            known = SchemaNode(target, pointer, base, node.old)
            if isinstance(target, dict):
                self._nodes[id(target)] = known
        return known

    def _inside(self, value: Any, path: str, node: SchemaNode) -> Any:
        for part in path.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                if isinstance(value, list):
                    value = value[int(part)] if _INDEX.fullmatch(part) else None
                else:
                    value = value[part]
            except (LookupError, TypeError):
                value = None
            if value is None:
                refuse(f"{node.pointer}/$ref", f"{node.schema['$ref'][:200]} does not exist")
        return value

    def _checked(self, node: SchemaNode) -> SchemaNode:
        """The node, whose keywords have the right shapes."""
        if not node.checked:
            check(node.schema, node.pointer)
            self._count(node)
            node.checked = True
        return node

    def _count(self, node: SchemaNode) -> None:
        if not isinstance(node.schema, dict):
            return
        self._values += len(node.schema.get("enum", ())) + ("const" in node.schema)
        if self._values > MAX_ENUM_VALUES:
            name = "enum" if "enum" in node.schema else "const"
            node.refuse(name, f"the schema has more than {MAX_ENUM_VALUES} values in enum and const")
        self._properties += len(node.schema.get("properties", ()))
        if self._properties > MAX_PROPERTIES:
            refuse(node.pointer, f"the schema has more than {MAX_PROPERTIES} properties")


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


def refuse(pointer: str, reason: str) -> NoReturn:
    """Raises InvalidRequest for the place in the schema."""
    raise InvalidRequest(f"at {pointer[:200]}: {reason}", param="grammar")


class UnwritableBranch(InvalidRequest):
    """An alternative that no rule can express: an output may be another one of the alternatives."""


def leave(pointer: str, reason: str) -> NoReturn:
    """Raises UnwritableBranch for the place in the schema."""
    raise UnwritableBranch(f"at {pointer[:200]}: {reason}", param="grammar")
