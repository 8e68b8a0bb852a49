"""Grammars: what an output must be, in one of the notations that callers write.

Plain values, shared by the SDK, the gateway, the wire and the engine.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from eyas.common.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 64 << 10
MAX_GRAMMAR_DEPTH = 128
"""The depth of brackets and of values inside values: no reader of a grammar may recurse too deeply."""

PYTHON = "python"
"""The `style` of a JSON schema in a structural tag whose values are written as Python's literals."""
BARE_TEXT = "bare_text"
"""The `type` of a part of a structural tag, a `BareText`, that is text as it stands."""
POINTER = "pointer"
"""Beside a JSON schema or bare text in a structural tag: where the caller wrote it, as errors say it."""

COMPACT = "compact"
"""The `style` of a JSON schema in a structural tag whose values are written without white space."""


class GrammarKind(enum.StrEnum):
    """The notation of a grammar's text."""

    JSON_SCHEMA = "json_schema"  # a JSON schema: the output is one value that it describes
    JSON_OBJECT = "json_object"  # no text: any JSON object
    REGEX = "regex"  # a regular expression that the whole output matches
    EBNF = "ebnf"  # rules in GBNF, from `root` on
    CHOICE = "choice"  # a JSON list of texts, one of which is the output
    STRUCTURAL_TAG = "structural_tag"  # xgrammar's JSON notation for text with structured parts


class BareText(msgspec.Struct, frozen=True, tag_field="type", tag=BARE_TEXT):
    """Text without some characters (`never`), and its form: as of `string_rules.StringPattern`."""

    patterns: tuple[str, ...] = ()
    anchored: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    never: str = ""
    pointer: str = "#"


class Grammar(msgspec.Struct, frozen=True):
    """The form of an output. JSON is written in one way, so that equal grammars are equal values."""

    kind: GrammarKind
    text: str = ""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """One JSON value that `schema` describes. Raises InvalidRequest for a text that is not JSON."""
        return cls(GrammarKind.JSON_SCHEMA, _json_text(schema, "a JSON schema"))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls(GrammarKind.JSON_OBJECT)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that `pattern` matches from its beginning to its end."""
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def ebnf(cls, rules: str) -> Grammar:
        """A grammar in GBNF, from its rule `root`."""
        return cls(GrammarKind.EBNF, rules)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of `texts`."""
        return cls(GrammarKind.CHOICE, _json_text(list(texts), "a list of texts"))

    @classmethod
    def structural_tag(cls, tag: Mapping[str, Any] | str) -> Grammar:
        """Text with structured parts, in xgrammar's notation. Raises InvalidRequest if it is not JSON."""
        return cls(GrammarKind.STRUCTURAL_TAG, _json_text(tag, "a structural tag"))

    def compact(self) -> Grammar:
        """Returns the grammar of the same JSON without white space; other notations stay unchanged."""
        if self.kind not in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT):
            return self
        schema = json.loads(self.text) if self.text else {"type": "object"}
        form = {"type": "json_schema", "json_schema": schema, "style": COMPACT, POINTER: "#"}
        return Grammar.structural_tag({"type": "structural_tag", "format": form})

    def validate(self) -> None:
        """Raises InvalidRequest for a grammar that is empty, too large or too deep."""
        if not self.text and self.kind is not GrammarKind.JSON_OBJECT:
            raise InvalidRequest("the grammar is empty", param="grammar")
        size, depth = len(self.text.encode("utf-8", "surrogatepass")), _depth(self.text)
        if size > MAX_GRAMMAR_BYTES:
            message = f"the grammar has {size} bytes, and {MAX_GRAMMAR_BYTES} is the most"
            raise InvalidRequest(message, param="grammar")
        if depth > MAX_GRAMMAR_DEPTH:
            message = f"the grammar is nested {depth} deep, and {MAX_GRAMMAR_DEPTH} is the most"
            raise InvalidRequest(message, param="grammar")
        if "\0" in self.text:
            raise InvalidRequest("the grammar holds a NUL character", param="grammar")


def renewed(tag: dict[str, Any]) -> dict[str, Any]:
    """A structural tag in an older notation, which clients still send: a list of (begin, schema, end), and
    triggers. Raises InvalidRequest for anything else.
    """
    try:
        tags = [
            {
                "type": "tag",
                "begin": one["begin"],
                "content": {"type": "json_schema", "json_schema": one["schema"]},
                "end": one["end"],
            }
            for one in tag["structures"]
        ]
    except (KeyError, TypeError):
        message = "structures must be a list of objects with begin, schema and end"
        raise InvalidRequest(message, param="grammar") from None
    form = {"type": "triggered_tags", "triggers": tag.get("triggers", []), "tags": tags}
    return {"type": "structural_tag", "format": form}


def _json_text(value: Any, what: str) -> str:
    try:
        if isinstance(value, str):
            value = json.loads(value)
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        text.encode()  # half of a surrogate pair is no text
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} must be JSON: {error}", param="grammar") from None


def _depth(text: str) -> int:
    """How deep brackets stand in brackets. Those in strings count too: this is a bound."""
    deepest = depth = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest
