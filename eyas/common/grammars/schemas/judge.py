"""Validates values against a schema: the whole of JSON Schema, for values that a schema itself holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from eyas.common.grammars.schemas import numbers, texts
from eyas.common.grammars.schemas.document import SchemaDocument, SchemaNode, refuse
from eyas.common.grammars.schemas.values import is_whole, kind_of, same

_MOST_NESTED = 100


class _SchemaVerdict(NamedTuple):
    """Whether it fits; which names and how many items were looked at by schemas of their own."""

    fits: bool
    names: frozenset[str] = frozenset()
    items: frozenset[int] = frozenset()


_NO = _SchemaVerdict(False)


class SchemaValidator:
    """Judges values by the schemas of a document."""

    def __init__(self, document: SchemaDocument, begins: Callable[[], None] = lambda: None) -> None:
        """`begins`: called before a value is compared with a schema."""
        self._document = document
        self._begins = begins
        self._enums: dict[int, frozenset[Any]] = {}  # by lists of the document, which live as long

    def fits(self, node: SchemaNode, value: Any) -> bool:
        """Whether the value fits. Raises InvalidRequest where that cannot be said."""
        return self._verdict(node, value, 0).fits

    def _verdict(self, node: SchemaNode, value: Any, depth: int) -> _SchemaVerdict:
        self._begins()
        schema = node.schema
        if isinstance(schema, bool):
            return _SchemaVerdict(schema)
        if depth > _MOST_NESTED:
            refuse(node.pointer, "the references go round")
        if not self._by_itself(node, value):
            return _NO
        names, items = set[str](), set[int]()
        for verdict in self._in_place(node, value, depth + 1):
            if not verdict.fits:
                return _NO
            names |= verdict.names
            items |= verdict.items
        if isinstance(value, list) and not self._fits_array(node, value, items, depth + 1):
            return _NO
        if isinstance(value, dict) and not self._fits_object(node, value, names, depth + 1):
            return _NO
        return _SchemaVerdict(True, frozenset(names), frozenset(items))

    def _by_itself(self, node: SchemaNode, value: Any) -> bool:
        """Whether the value fits the keywords without schemas."""
        schema, kind = node.schema, kind_of(value)
        if node.old and "$ref" in schema:
            return True
        if "type" in schema:
            types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
            if kind not in types and not ("integer" in types and is_whole(value)):
                return False
        if "const" in schema and same(schema["const"]) != same(value):
            return False
        if "enum" in schema and same(value) not in self._values_of(node):
            return False
        match kind:
            case "number":
                return numbers.fits(node, value)
            case "string":
                return texts.fits(node, value)
            case "array":
                unique = not schema.get("uniqueItems") or len(set(map(same, value))) == len(value)
                return unique and _counts(schema, "Items", len(value))
            case "object":
                return _counts(schema, "Properties", len(value)) and set(schema.get("required", ())) <= set(
                    value
                )
        return True

    def _values_of(self, node: SchemaNode) -> frozenset[Any]:
        """The values of its `enum`, as `same` compares them."""
        values = node.schema["enum"]
        if id(values) not in self._enums:
            self._enums[id(values)] = frozenset(map(same, values))
        return self._enums[id(values)]

    def _in_place(self, node: SchemaNode, value: Any, depth: int) -> Iterable[_SchemaVerdict]:
        """The verdicts of schemas on the same value."""
        schema = node.schema
        if "$ref" in schema:
            yield self._verdict(self._document.target(node), value, depth)
            if node.old:
                return
        for name in ("allOf", "anyOf", "oneOf"):
            if name in schema:
                parts = (self._document.node(node, name, i) for i in range(len(schema[name])))
                verdicts = [self._verdict(part, value, depth) for part in parts]
                yield from _together(name, verdicts)
        if "not" in schema:
            yield _SchemaVerdict(not self._verdict(self._document.node(node, "not"), value, depth).fits)
        if "if" in schema:
            condition = self._verdict(self._document.node(node, "if"), value, depth)
            if condition.fits:
                yield condition
            then = "then" if condition.fits else "else"
            if then in schema:
                yield self._verdict(self._document.node(node, then), value, depth)
        if isinstance(value, dict):
            for word, name, names in dependents(node):
                if name in value and names is not None:
                    yield _SchemaVerdict(set(names) <= set(value))
                elif name in value:
                    yield self._verdict(self._document.node(node, word, name), value, depth)

    def _fits_array(self, node: SchemaNode, value: list[Any], seen: set[int], depth: int) -> bool:
        """Whether an array fits the schemas of items; adds the evaluated ones to `seen`."""
        if node.old and "$ref" in node.schema:
            return True
        first, rest = items_of(self._document, node)
        for i, item in enumerate(value):
            part = first[i] if i < len(first) else rest
            if part is not None:
                if not self._verdict(part, item, depth).fits:
                    return False
                seen.add(i)
        if "contains" in node.schema:
            part = self._document.node(node, "contains")
            matching = {i for i, item in enumerate(value) if self._verdict(part, item, depth).fits}
            if (
                not node.schema.get("minContains", 1)
                <= len(matching)
                <= node.schema.get("maxContains", len(value))
            ):
                return False
            seen |= matching
        if "unevaluatedItems" in node.schema:
            part = self._document.node(node, "unevaluatedItems")
            if not all(self._verdict(part, value[i], depth).fits for i in range(len(value)) if i not in seen):
                return False
            seen.update(range(len(value)))
        return True

    def _fits_object(self, node: SchemaNode, value: dict[str, Any], seen: set[str], depth: int) -> bool:
        """Whether an object fits the schemas of properties; adds the evaluated ones to `seen`."""
        schema = node.schema
        if node.old and "$ref" in schema:
            return True
        for name, part in value.items():
            nodes = properties_of(self._document, node, name)
            if "propertyNames" in schema:
                names = self._document.node(node, "propertyNames")
                if not self._verdict(names, name, depth).fits:
                    return False
            if not all(self._verdict(one, part, depth).fits for one in nodes):
                return False
            if nodes:
                seen.add(name)
        if "unevaluatedProperties" in schema:
            rest = self._document.node(node, "unevaluatedProperties")
            if not all(self._verdict(rest, value[name], depth).fits for name in value if name not in seen):
                return False
            seen.update(value)
        return True


def items_of(document: SchemaDocument, node: SchemaNode) -> tuple[list[SchemaNode], SchemaNode | None]:
    """The schemas of an array's first items, and that of all others if there is one."""
    schema = node.schema
    if isinstance(schema.get("items"), list):  # as it was written up to 2019
        first = [document.node(node, "items", i) for i in range(len(schema["items"]))]
        return first, document.node(node, "additionalItems") if "additionalItems" in schema else None
    first = [document.node(node, "prefixItems", i) for i in range(len(schema.get("prefixItems", ())))]
    return first, document.node(node, "items") if "items" in schema else None


def properties_of(document: SchemaDocument, node: SchemaNode, name: str) -> list[SchemaNode]:
    """The schemas of the property of this name."""
    schema = node.schema
    nodes = [document.node(node, "properties", name)] if name in schema.get("properties", ()) else []
    for pattern in schema.get("patternProperties", ()):
        if texts.search(pattern, name, f"{node.pointer}/patternProperties"):
            nodes.append(document.node(node, "patternProperties", pattern))
    if not nodes and "additionalProperties" in schema:
        nodes = [document.node(node, "additionalProperties")]
    return nodes


def dependents(node: SchemaNode) -> list[tuple[str, str, list[str] | None]]:
    """Returns the rules on a property's presence: keyword, property, and names, or None for a schema."""
    rules: list[tuple[str, str, list[str] | None]] = []
    for word in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, part in node.schema.get(word, {}).items():
            rules.append((word, name, part if isinstance(part, list) else None))
    return rules


def _together(name: str, verdicts: list[_SchemaVerdict]) -> Iterable[_SchemaVerdict]:
    good = [one for one in verdicts if one.fits]
    enough = {"allOf": len(good) == len(verdicts), "anyOf": bool(good), "oneOf": len(good) == 1}[name]
    return good if enough else [_NO]


def _counts(schema: dict[str, Any], of: str, count: int) -> bool:
    return bool(schema.get(f"min{of}", 0) <= count <= schema.get(f"max{of}", count))
