"""A model that writes whatever a grammar allows, and schemas of tools that tempt it to go wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import xgrammar

from eyas.common.grammars.compiler import GrammarCompiler
from eyas.common.grammars.notations import Grammar
from gateway.formats.tool_fields import ToolFields
from gateway.grammars.tool_grammar import answer_grammar
from gateway.parsers.message import MessageReading
from gateway.parsers.table import TOOL_FORMATS
from tests.unit.grammar_cases import random_schema

_TEMPTING = [
    *("</parameter>", "\n</parameter>\n", "</arg_value>", "</function>", "</tool_call>", "<tool_call>"),
    *("<parameter=", "\n", '"', "'", "\\", "\\\\", "{", "}", "[", "]", "()", "null", "None", "True", "true"),
    *("é", "\U0001f642", "\u2028", " ", "123", "-0", "1e9", ", ", ": ", "</", "\\u", "\\x", "d83d", "a=1"),
]
_PIECES = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in _TEMPTING]
_END = len(_PIECES)
_ENDERS = frozenset(b"\"'\n<]})")


class Writer:
    """Writes texts that grammars allow: tokens of one byte and of several, some more often than others."""

    def __init__(self) -> None:
        with mock.patch("eyas.common.grammars.compiler.pieces", lambda folder: [*_PIECES, b""]):
            self._compiler = GrammarCompiler(Path(), eos_ids=[_END])
        self._mask = xgrammar.allocate_token_bitmask(1, _END + 1)

    def write(self, grammar: Grammar, pick: random.Random, most: int = 1500) -> str | None:
        """One whole output; None if it has more than `most` tokens."""
        matcher = xgrammar.GrammarMatcher(self._compiler.compile(grammar))
        written = bytearray()
        free = 0  # how long the text has been free: the longer, the sooner it ends
        for _ in range(most):
            matcher.fill_next_token_bitmask(self._mask)
            bits = numpy.unpackbits(self._mask.numpy().view(numpy.uint8), bitorder="little")[: _END + 1]
            allowed = numpy.flatnonzero(bits)
            assert len(allowed), f"nothing may follow {bytes(written)!r}"
            if bits[_END] and pick.random() < 0.7:
                return written.decode(errors="replace")
            token = self._one(allowed, pick, free)
            if token == _END:
                return written.decode(errors="replace")
            free = free + 1 if len(allowed) > 30 else 0
            assert matcher.accept_token(token)
            written += _PIECES[token]
        return None

    def accepts(self, grammar: Grammar, text: bytes) -> bool:
        """Whether the text is a whole output."""
        matcher = xgrammar.GrammarMatcher(self._compiler.compile(grammar))
        return bool(matcher.accept_string(text) and matcher.is_completed())

    @staticmethod
    def _one(allowed: Any, pick: random.Random, free: int) -> int:
        """A token: where text is free, what ends it is sought after a while."""
        if free > 6:
            ends = [token for token in allowed if int(token) in _ENDERS]
            if ends and pick.random() < 0.6:
                return int(pick.choice(ends))
        liked = [token for token in allowed if 256 <= token < _END]
        if liked and pick.random() < 0.5:
            return int(pick.choice(liked))
        letters = [token for token in allowed if token < 128]
        return int(pick.choice(letters if letters and pick.random() < 0.9 else list(allowed)))


def demanded(
    format: str, schema: Mapping[str, Any] | None, name: str = "f"
) -> tuple[Grammar, MessageReading]:
    """The grammar of one call of a tool, and how it is read."""
    tool = {"type": "function", "function": {"name": name, "parameters": schema}}
    choice = {"type": "function", "function": {"name": name}}
    fields = ToolFields.model_validate({"tools": [tool], "tool_choice": choice})
    reading = MessageReading(TOOL_FORMATS[format], {name: schema or {}})
    grammar = answer_grammar(fields, reading, None, lambda marker: None)
    assert grammar is not None
    return grammar, reading


_TEXTS: list[Any] = [
    {"type": "string"},
    {"type": ["string"]},
    {"type": "string", "maxLength": 9},
    {"type": "string", "minLength": 3},
    {"type": "string", "pattern": ".*"},
    {"type": "string", "pattern": r"^[\s\S]+$"},
    {"type": "string", "pattern": r"[^a-z]{2,5}x|a\.b[+-]?"},
    {"type": "string", "pattern": r"(?:\\|\"|'|\t){1,3}"},
    {"type": "string", "enum": ["a", "b c", "é\n", "null", "1", "'\"\\"]},
    {"enum": ["null", None, "x"]},
    {"enum": ["1", 1, True, None, [1, "a"], {"k": "v"}]},
    {"const": "123"},
    {"type": ["string", "null"]},
    {"type": ["string", "null"], "maxLength": 4},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
    {"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}], "default": None},
    {"$ref": "#/$defs/color"},
    {"$ref": "#/$defs/node"},
    {},
    {"description": "anything"},
    {"type": "array", "items": {"type": "string"}},
    {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]},
    {"type": "object"},
    {"type": "integer"},
    {"type": "integer", "minimum": 3},
    {"type": "integer", "exclusiveMaximum": -7},
    {"type": "integer", "minimum": -120, "maximum": 1234},
    {"type": "integer", "multipleOf": 5},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": 0},
    {"type": "number", "minimum": -2.5, "exclusiveMaximum": 7.25},
    *(
        {"type": "string", "format": name}
        for name in ("date", "date-time", "email", "ipv6", "uri", "duration")
    ),
]
_DEFS = {
    "color": {"type": "string", "enum": ["red", "green"]},
    "node": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
        "required": ["name", "next"],
        "additionalProperties": False,
    },
}


def random_parameters(pick: random.Random) -> dict[str, Any]:
    """A schema of a tool's parameters."""
    names = pick.sample(["a", "b", "from", "ü", "class", "x_1"], pick.randrange(1, 5))
    values = [pick.choice(_TEXTS) if pick.random() < 0.75 else random_schema(pick, 2) for _ in names]
    return {
        "type": "object",
        "properties": dict(zip(names, values, strict=True)),
        "required": [name for name in names if pick.random() < 0.7],
        "$defs": _DEFS,
    } | pick.choice([{}, {"additionalProperties": False}, {"additionalProperties": True}])
