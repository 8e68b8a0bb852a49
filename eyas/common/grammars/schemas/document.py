"""A JSON schema with its parts by place, and what references in it lead to."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from eyas.common.grammars.schemas.places import below, escaped
from eyas.common.grammars.schemas.refusals import refuse
from eyas.common.grammars.schemas.shapes import check

MAX_DEPTH = 32
MAX_ENUM_VALUES = 1000
MAX_PROPERTIES = 2000

_LONGEST_CHAIN = 32
_OLD = re.compile(r"draft-0[3-7]")  # in which nothing beside $ref counts
_INDEX = re.compile(r"0|[1-9][0-9]*")


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
