"""The constraints of a schema on strings: lengths, patterns, formats, and what they are not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from eyas.common.grammars import text_formats
from eyas.common.grammars.automata import Automaton, of_pattern, reads
from eyas.common.grammars.regex_syntax import UnsupportedPattern, read
from eyas.common.grammars.schemas.document import SchemaNode, leave

_FREE_FORMATS = frozenset("password path file-path directory-path binary byte-string regex-text".split())
_SAME_FORMATS = {**dict.fromkeys(("uuid1", "uuid3", "uuid4", "uuid5"), "uuid"), "idn-email": "email"}
_ENCODINGS = {
    "base64": "([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    "base64url": "([A-Za-z0-9_-]{4})*([A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?",
    "base16": "([0-9A-Fa-f]{2})*",
    **dict.fromkeys(("7bit", "8bit", "binary"), ""),
}
_URL = (
    r"https?://([a-z0-9]{1,20}\.){0,2}[a-z]{2,10}(:[1-9][0-9]{0,3})?"
    r"(/[a-zA-Z0-9._~-]{0,20}){0,4}(\?[a-zA-Z0-9=&_-]{0,30})?(#[a-zA-Z0-9_-]{0,20})?"
)
"""The pattern of a URI whose length is bounded, as those of pydantic are: an address of the web."""
_MADE_SIMPLE = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$",
}
"""Patterns that pydantic writes, which look around, and what they match."""


@dataclass(frozen=True)
class StringRules:
    """The constraints of a string: its length, patterns that are in it or (False) not, patterns of the whole
    of it, and excluded strings.
    """

    least: int = 0
    most: int | None = None
    patterns: tuple[tuple[str, bool], ...] = ()
    wholes: tuple[tuple[str, bool], ...] = ()
    excluded: frozenset[str] = frozenset()
    initial: tuple[str, bool] | None = None  # the first character is one of these, or none of them

    @property
    def is_empty(self) -> bool:
        """Whether no string can be that, as can be seen from the lengths."""
        return self.most is not None and self.least > self.most


def formats() -> frozenset[str]:
    """The formats of strings that can be followed."""
    return (
        frozenset(text_formats.FORMATS) | _FREE_FORMATS | frozenset(_SAME_FORMATS) | {"base64", "base64url"}
    )


def said(node: SchemaNode) -> StringRules:
    """Reads the schema's constraints of strings. Raises InvalidRequest for those that cannot be followed."""
    schema = node.schema
    most = schema.get("maxLength")
    rules = StringRules(int(schema.get("minLength", 0)), None if most is None else int(most))
    if "pattern" in schema:
        rules = replace(rules, patterns=((simple(schema["pattern"], f"{node.pointer}/pattern"), True),))
    whole = _whole(node)
    return replace(rules, wholes=((whole, True),)) if whole else rules


def both(one: StringRules, other: StringRules) -> StringRules:
    """Joins the constraints of both."""
    most = [text.most for text in (one, other) if text.most is not None]
    return replace(
        one,
        least=max(one.least, other.least),
        most=min(most) if most else None,
        patterns=tuple(dict.fromkeys((*one.patterns, *other.patterns))),
        wholes=tuple(dict.fromkeys((*one.wholes, *other.wholes))),
        excluded=one.excluded | other.excluded,
    )


def fits(node: SchemaNode, value: str) -> bool:
    """Whether the string is what the schema says of strings."""
    text = said(node)
    return (
        text.least <= len(value)
        and (text.most is None or len(value) <= text.most)
        and all(search(p, value, f"{node.pointer}/pattern") is expected for p, expected in text.patterns)
        and all(reads(_automaton(p, False, node.pointer), value) is expected for p, expected in text.wholes)
    )


def search(pattern: str, value: str, pointer: str) -> bool:
    """Whether the pattern matches somewhere in the value. Raises InvalidRequest for one that is none."""
    return reads(_automaton(simple(pattern, pointer), True, pointer), value)


def simple(pattern: str, pointer: str) -> str:
    """The pattern without look-around."""
    pattern = _MADE_SIMPLE.get(pattern, pattern)
    _automaton(pattern, True, pointer)
    return pattern


@lru_cache(1024)
def _automaton(pattern: str, search: bool, pointer: str) -> Automaton:
    try:
        return of_pattern(read(pattern), search)
    except UnsupportedPattern as reason:
        leave(pointer, f"the pattern is not supported: {reason}")


def _whole(node: SchemaNode) -> str:
    """A pattern of the whole string, from its format and encoding; "": any."""
    schema = node.schema
    format = schema.get("format", "")
    format = _SAME_FORMATS.get(format, format)
    if format in ("base64", "base64url"):
        return _ENCODINGS[format]
    if format == "uri" and {"minLength", "maxLength"} & schema.keys():
        return _URL
    if format in text_formats.FORMATS:
        return text_formats.FORMATS[format]
    encoding = schema.get("contentEncoding", "")
    return _ENCODINGS.get(encoding, "")
