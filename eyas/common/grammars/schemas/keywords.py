"""Applies a schema's keywords to a case, where values fit it and where they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from eyas.common.grammars.schemas import numbers, strings, texts
from eyas.common.grammars.schemas.branches import (
    CaseSplit,
    ContainsCount,
    EmptyCase,
    Fact,
    SchemaLayer,
    SchemaLiteral,
    SchemaScope,
    Scopes,
    ValueCase,
    fits,
    fits_not,
)
from eyas.common.grammars.schemas.document import SchemaDocument, SchemaNode, leave
from eyas.common.grammars.schemas.judge import dependents, items_of
from eyas.common.grammars.schemas.values import exactly, kind_of

OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format", "contentEncoding"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {
        *("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains"),
        *("maxContains", "additionalItems", "unevaluatedItems"),
    },
    "object": {
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        "unevaluatedProperties",
    },
}


class KeywordReader:
    """Reads the schemas of a document."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document

    def assume(self, case: ValueCase, node: SchemaNode, scopes: Scopes) -> None:
        """Makes the case one of values that fit the schema. Raises EmptyCase if none does."""
        schema = node.schema
        alone = node.old and "$ref" in schema
        if "$ref" in schema:
            case.assume(self._document.target(node), scopes)
        if alone:
            return
        for name in ("unevaluatedProperties", "unevaluatedItems"):
            if name in schema and name[11:] == {"object": "Properties", "array": "Items"}.get(case.kind):
                scopes = (*scopes, len(case.scopes))
                case.scopes.append(SchemaScope(self._document.node(node, name), []))
        _assume_values(case, node)
        case.implied |= {kind for kind, names in OF_TYPE.items() if names & schema.keys()}
        for i in range(len(schema.get("allOf", ()))):
            case.assume(self._document.node(node, "allOf", i), scopes)
        match case.kind:
            case "number":
                self._assume_number(case, node)
            case "string":
                self._assume_string(case, node)
            case "array":
                self._assume_array(case, node, scopes)
            case "object":
                self._assume_object(case, node, scopes)
        self._split(case, node, scopes)

    def _split(self, case: ValueCase, node: SchemaNode, scopes: Scopes) -> None:
        schema, document = node.schema, self._document
        if "not" in schema:
            case.deny(document.node(node, "not"))
        if "anyOf" in schema:
            parts = [document.node(node, "anyOf", i) for i in range(len(schema["anyOf"]))]
            case.splits.append(CaseSplit(lambda: ([fits(part, scopes)] for part in parts), True))
        if "oneOf" in schema:
            ones = [document.node(node, "oneOf", i) for i in range(len(schema["oneOf"]))]
            tag = schema.get("discriminator")
            name = tag.get("propertyName") if isinstance(tag, dict) else None
            if isinstance(name, str) and case.kind == "object":
                case.require(name)
            case.splits.append(CaseSplit(lambda: _just_one(ones, scopes), False))
        if "if" in schema and ("then" in schema or "else" in schema):
            case.splits.append(CaseSplit(lambda: self._condition(node, scopes), False))

    def _condition(self, node: SchemaNode, scopes: Scopes) -> Iterator[list[Fact]]:
        condition = self._document.node(node, "if")
        then, other = (
            [fits(self._document.node(node, name), scopes)] if name in node.schema else []
            for name in ("then", "else")
        )
        yield [fits(condition, scopes), *then]
        yield [fits_not(condition), *other]

    def _assume_number(self, case: ValueCase, node: SchemaNode) -> None:
        known = node.schema.get("format")
        if known is not None and known not in numbers.FORMATS and known not in texts.formats():
            node.refuse(
                "format", f"the format is not supported (supported are {', '.join(sorted(texts.formats()))})"
            )
        case.number = numbers.both(case.number, numbers.said(node))

    def _assume_string(self, case: ValueCase, node: SchemaNode) -> None:
        schema = node.schema
        known = schema.get("format")
        if known is not None and known not in texts.formats() and known not in numbers.FORMATS:
            node.refuse(
                "format", f"the format is not supported (supported are {', '.join(sorted(texts.formats()))})"
            )
        said = texts.said(node)
        strings.check(said, node.pointer)
        case.text = texts.both(case.text, said)
        if case.text.is_empty:
            raise EmptyCase

    def _assume_array(self, case: ValueCase, node: SchemaNode, scopes: Scopes) -> None:
        schema = node.schema
        case.count(
            int(schema.get("minItems", 0)), None if "maxItems" not in schema else int(schema["maxItems"])
        )
        case.unique |= schema.get("uniqueItems", False)
        first, rest = items_of(self._document, node)
        if first or rest is not None:
            layer = SchemaLayer(node, first, rest)
            case.layers.append(layer)
            for place in scopes:
                case.scopes[place].layers.append(layer)
        if "contains" in schema:
            most = schema.get("maxContains")
            part = self._document.node(node, "contains")
            least = int(schema.get("minContains", 1))
            case.contained.append(
                ContainsCount(SchemaLiteral(part), least, None if most is None else int(most))
            )
            case.count(least, None)

    def _assume_object(self, case: ValueCase, node: SchemaNode, scopes: Scopes) -> None:
        schema = node.schema
        case.count(
            int(schema.get("minProperties", 0)),
            None if "maxProperties" not in schema else int(schema["maxProperties"]),
        )
        for name in schema.get("required", ()):
            case.require(name)
        layer = SchemaLayer(node)
        case.layers.append(layer)
        for place in scopes:
            case.scopes[place].layers.append(layer)
        if "propertyNames" in schema:
            case.names.append(SchemaLiteral(self._document.node(node, "propertyNames")))
        for word, name, names in dependents(node):
            case.splits.append(CaseSplit(self._dependent(node, word, (name, names), scopes), False))

    def _dependent(
        self, node: SchemaNode, word: str, what: tuple[str, list[str] | None], scopes: Scopes
    ) -> Callable[[], Iterator[list[Fact]]]:
        name, names = what

        def alternatives() -> Iterator[list[Fact]]:
            yield [lambda case: case.lack(name)]
            if names is None:
                part = self._document.node(node, word, name)
                yield [lambda case: case.require(name), fits(part, scopes)]
            else:
                yield [_requires(one) for one in (name, *names)]

        return alternatives

    # --- what does not fit -------------------------------------------------------------------------------

    def denials(self, case: ValueCase, node: SchemaNode) -> Iterator[list[Fact]]:
        """The ways in which a value of the case's type does not fit the schema."""
        schema, document = node.schema, self._document
        if "$ref" in schema:
            yield [fits_not(document.target(node))]
            if node.old:
                return
        if "type" in schema:
            types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
            if case.kind == "number" and "number" not in types and "integer" in types:
                if case.number.whole is None:
                    yield [lambda case: case.say(whole=False)]
                elif case.number.whole is False:
                    yield []
            elif case.kind not in types:
                yield []
                return
        for name in ("enum", "const"):
            if name in schema:
                yield [_other_than(node, schema["enum"] if name == "enum" else [schema["const"]])]
        for i in range(len(schema.get("allOf", ()))):
            yield [fits_not(document.node(node, "allOf", i))]
        if "anyOf" in schema:
            yield [fits_not(document.node(node, "anyOf", i)) for i in range(len(schema["anyOf"]))]
        if "oneOf" in schema:
            ones = [document.node(node, "oneOf", i) for i in range(len(schema["oneOf"]))]
            yield [fits_not(one) for one in ones]
            for i, one in enumerate(ones):
                for other in ones[i + 1 :]:
                    yield [fits(one), fits(other)]
        if "not" in schema:
            yield [fits(document.node(node, "not"))]
        if "if" in schema:
            condition = document.node(node, "if")
            if "then" in schema:
                yield [fits(condition), fits_not(document.node(node, "then"))]
            if "else" in schema:
                yield [fits_not(condition), fits_not(document.node(node, "else"))]
        own = {
            "number": _not_number,
            "string": _not_string,
            "array": self._not_array,
            "object": self._not_object,
        }
        if case.kind in own:
            yield from own[case.kind](node)

    def _not_array(self, node: SchemaNode) -> Iterator[list[Fact]]:
        schema = node.schema
        yield from _not_counts(schema, "Items")
        first, rest = items_of(self._document, node)
        for i, part in enumerate(first):
            if part.schema is not True:
                yield [_item_is_not(i, part)]
        if rest is not None and rest.schema is not True:
            if first:
                yield [_refused(node, "prefixItems")]
            else:
                yield [_holds(SchemaLiteral(rest, False), 1)]
        if schema.get("uniqueItems"):
            yield [_refused(node, "uniqueItems")]
        if "contains" in schema:
            part = self._document.node(node, "contains")
            least, most = int(schema.get("minContains", 1)), schema.get("maxContains")
            if least:
                yield [lambda case: case.contained.append(ContainsCount(SchemaLiteral(part), 0, least - 1))]
            if most is not None:
                yield [_holds(SchemaLiteral(part), int(most) + 1)]
        if "unevaluatedItems" in schema:
            yield [_refused(node, "unevaluatedItems")]

    def _not_object(self, node: SchemaNode) -> Iterator[list[Fact]]:
        schema = node.schema
        for name in schema.get("required", ()):
            yield [lambda case, name=name: case.lack(name)]  # type: ignore[misc]
        for name in schema.get("properties", ()):
            part = self._document.node(node, "properties", name)
            if part.schema is not True:
                yield [lambda case, n=name, p=part: case.require(n, SchemaLiteral(p, False))]  # type: ignore[misc]
        yield from _not_counts(schema, "Properties")
        for word, name, names in dependents(node):
            if names is None:
                part = self._document.node(node, word, name)
                yield [_requires(name), fits_not(part)]
            for other in names or ():
                yield [_requires(name), lambda case, other=other: case.lack(other)]  # type: ignore[misc]
        for name in ("patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties"):
            if schema.get(name, True) not in (True, {}):
                yield [_refused(node, name)]


def _refused(node: SchemaNode, name: str) -> Fact:
    return lambda case: leave(f"{node.pointer}/{name}", f"{name} is not supported where it must not fit")


def _just_one(parts: list[SchemaNode], scopes: Scopes) -> Iterator[list[Fact]]:
    for i, part in enumerate(parts):
        yield [fits(part, scopes), *(fits_not(other) for j, other in enumerate(parts) if j != i)]


def _requires(name: str) -> Fact:
    return lambda case: case.require(name)


def _holds(literal: SchemaLiteral, least: int) -> Fact:
    def fact(case: ValueCase) -> None:
        case.contained.append(ContainsCount(literal, least, None))
        case.count(least, None)

    return fact


def _item_is_not(place: int, part: SchemaNode) -> Fact:
    def fact(case: ValueCase) -> None:
        case.count(place + 1, None)
        case.extra.setdefault(str(place), []).append(SchemaLiteral(part, False))

    return fact


def _other_than(node: SchemaNode, values: list[Any]) -> Fact:
    """The value is none of these."""

    def fact(case: ValueCase) -> None:
        for value in values:
            if kind_of(value) != case.kind:
                continue
            if case.kind == "number":
                case.exclude_number(exactly(value))
            elif case.kind == "string":
                case.say(excluded=case.text.excluded | {value})
            elif case.kind in ("array", "object"):
                _differ(case, node, value)

    return fact


def _differ(case: ValueCase, node: SchemaNode, value: Any) -> None:
    """A list or an object is another one, as can be said of its size."""
    if not value:
        case.count(1, None)
    else:
        leave(node.pointer, "a list or an object cannot be what a value must not be")


def _assume_values(case: ValueCase, node: SchemaNode) -> None:
    schema = node.schema
    if "type" in schema:
        case.is_typed = True
        types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if case.kind == "number" and "number" not in types and "integer" in types:
            if case.number.whole is False:
                raise EmptyCase
            case.number = replace(case.number, whole=True)
        elif case.kind not in types:
            raise EmptyCase
    for name in ("enum", "const"):
        if name in schema:
            case.is_typed = True
            values = schema["enum"] if name == "enum" else [schema["const"]]
            case.among([value for value in values if kind_of(value) == case.kind])


def _not_number(node: SchemaNode) -> Iterator[list[Fact]]:
    schema = node.schema
    opposite = {"least": "below", "most": "above", "above": "most", "below": "least"}
    limits = numbers.said(node)
    for name, other in opposite.items():
        bound = getattr(limits, name)
        if bound is not None:
            yield [lambda case, o=other, b=bound: case.bound(**{o: b})]  # type: ignore[misc]
    if "multipleOf" in schema:
        of = exactly(schema["multipleOf"])
        yield [lambda case: case.say(others=(*case.number.others, of))]


def _not_string(node: SchemaNode) -> Iterator[list[Fact]]:
    text_rules = texts.said(node)
    if text_rules.least:
        yield [lambda case: case.say(most=_least(case.text.most, text_rules.least - 1))]
    if text_rules.most is not None:
        most = text_rules.most
        yield [lambda case: case.say(least=max(case.text.least, most + 1))]
    for pattern, expected in text_rules.patterns:
        yield [lambda case, p=(pattern, not expected): case.say(patterns=(*case.text.patterns, p))]  # type: ignore[misc]
    for whole, expected in text_rules.wholes:
        yield [lambda case, p=(whole, not expected): case.say(wholes=(*case.text.wholes, p))]  # type: ignore[misc]


def _least(one: int | None, other: int) -> int:
    return other if one is None else min(one, other)


def _not_counts(schema: dict[str, Any], of: str) -> Iterator[list[Fact]]:
    least, most = int(schema.get(f"min{of}", 0)), schema.get(f"max{of}")
    if least:
        yield [lambda case: case.count(0, least - 1)]
    if most is not None:
        yield [lambda case: case.count(int(most) + 1, None)]
