"""The grammar of parameters whose values stand bare between tags.

What it lets through is read back (`bare_values`) as the schema says, to the character: text that a schema
bounds holds no `<`, other text no tag that ends it; whatever else is JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from eyas.common.errors import InvalidRequest
from eyas.common.grammars.regex_syntax import UnsupportedPattern
from eyas.common.grammars.string_rules import StringContext, StringPattern, rules_of
from eyas.common.grammars.text_formats import text_of
from gateway.parsers.bare_values import ParameterFormat
from gateway.parsers.kinds import BRANCHES, ParameterKinds, ValueKind, kinds_of
from gateway.parsers.parameters import (
    OTHER_NAMES,
    ObjectParameters,
    constraint,
    only_text,
    parameters_of,
    standing,
    unfollowed,
    unheld,
)
from gateway.parsers.tags import Format, arguments, either, optional, sequence, text

_SAYS_NOTHING = frozenset("title description default examples deprecated readOnly writeOnly $comment".split())
_WITHOUT_TAGS = StringContext("<")  # what tags begin with


def parameters(tool: str, schema: Mapping[str, Any], written: ParameterFormat) -> Format:
    """The parameters of a call, in the order of the schema, each where it is required or not.

    Raises InvalidRequest for what cannot be held to.
    """
    branch = _ObjectBranch(written, kinds_of(schema), schema)
    try:
        return either([branch.of(part) for part in parameters_of(schema)])
    except InvalidRequest as error:
        raise InvalidRequest(f"{unfollowed(tool)}{error.message}", param="tools") from None


class _ObjectBranch:
    """The grammar of an object's parameters; `root`: where references are looked up."""

    def __init__(self, written: ParameterFormat, kinds: ParameterKinds, root: Any) -> None:
        self._written = written
        self._kinds = kinds
        self._root = root

    def of(self, parameters: ObjectParameters) -> Format:
        lines = []
        for title, value in parameters.named.items():
            if not re.fullmatch(self._written.name, title):
                unheld(title, "the format of the model's calls cannot write this name")
            line = self._line(text(self._written.before.format(title)), title, value)
            if line is not None:
                lines.append(line if title in parameters.required else optional(line))
            elif title in parameters.required:
                unheld(title, "no value of it can be written")
        if parameters.others is not None:
            before, after = self._written.before.split("{}")
            name: Format = {"type": "regex", "pattern": OTHER_NAMES}
            line = self._line(sequence(text(before), name, text(after)), "", parameters.others)
            assert line is not None
            lines.append({"type": "star", "content": line})
        return sequence(*lines) if lines else text("")

    def _line(self, before: Format, title: str, value: Any) -> Format | None:
        """A parameter's line; None: it can have no value."""
        if value is False:
            return None
        kind = self._kinds.of(title) if title else self._kinds.others
        return sequence(before, self._value(title, value, kind), text(self._written.after))

    def _value(self, title: str, schema: Any, kind: ValueKind) -> Format:
        if schema is True or not set(schema) - _SAYS_NOTHING:
            return self._free()
        if kind.is_json:
            return arguments(standing(schema, self._root))
        only_text(schema, self._root, f"#/properties/{title[:100]}")
        try:
            return either(self._words(schema))
        except UnsupportedPattern as reason:
            unheld(title, str(reason))

    def _free(self) -> Format:
        return {"type": "any_text", "excludes": [self._written.end]}

    def _words(self, schema: Any) -> list[Format]:
        """The allowed texts: one of these; null stands as it is."""
        said = constraint(schema, self._root)
        for name in BRANCHES:
            if name in said:
                return [words for branch in said[name] for words in self._words(branch)]
        if "const" in said or "enum" in said:
            values = said["enum"] if "enum" in said else [said["const"]]
            return [text(self._constant(value)) for value in values]
        types = said.get("type")
        names = types if isinstance(types, list) else [types]
        return [text("null") if name == "null" else self._bounded(said) for name in names]

    def _constant(self, value: Any) -> str:
        if isinstance(value, str) and self._written.end in value:
            raise UnsupportedPattern(
                f"a value holds {self._written.end}, which ends it in the model's format"
            )
        return value if isinstance(value, str) else json.dumps(value)

    def _bounded(self, said: Mapping[str, Any]) -> Format:
        text = text_of(said)
        if text == StringPattern():
            return self._free()
        return {"type": "grammar", "grammar": rules_of(text, _WITHOUT_TAGS, "root")}
