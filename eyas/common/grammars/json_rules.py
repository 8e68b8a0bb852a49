"""Rules of JSON values without white space, made rules of what a printer of JSON writes.

They are read token by token and written anew: white space is what an indenting printer writes at that depth.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from typing import Any

from eyas.common.errors import InvalidRequest
from eyas.common.grammars.notations import COMPACT, PYTHON
from eyas.common.grammars.string_rules import quoted

MAX_INDENTED = 16
"""Values inside values that are indented; what lies deeper is written without new lines."""

_TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|\(=|[()|*+?]|\w+|\{[-\d, ]+\}',
    re.DOTALL,
)
_LITERAL = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
_OPEN, _CLOSE, _COMMA = ('"{"', '"["'), ('"}"', '"]"'), ('","', '", "')
Rules = dict[str, list[str]]


_VALUE = re.compile(r'[{\["]|(?:true|false|null)\Z')  # a constant that Python may write otherwise


# Rules of JSON values, made rules of the same values as Python's literals. What these rules let through,
# Python reads as the value that JSON would have.
def numbers() -> dict[str, str]:
    """Rules by name: numbers that a float can hold."""
    return {"basic_number": '"-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+\\-]? [0-9]{1,2})?'}


def constant(text: str) -> str:
    """A constant of JSON as a literal; other text stays. Raises InvalidRequest if Python cannot write it."""
    if not _VALUE.match(text):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text  # a bracket or a quote by itself
    return literal(value)


def literal(value: Any) -> str:
    """A JSON value as a literal; its strings are in double quotes, without characters that need an escape.

    Raises InvalidRequest for text with half a surrogate pair, and for numbers that are none.
    """
    match value:
        case None | bool():
            return str(value)
        case list():
            return f"[{', '.join(map(literal, value))}]"
        case dict():
            return "{" + ", ".join(f"{literal(key)}: {literal(part)}" for key, part in value.items()) + "}"
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        raise InvalidRequest("a value of it cannot be written in Python", param="grammar") from None
    return text


class JsonStyle(Enum):
    """How values are written: as JSON, as JSON without white space, or as Python's literals."""

    JSON = "json"
    COMPACT = COMPACT
    PYTHON = PYTHON


def json_rules(compact: str, style: JsonStyle = JsonStyle.JSON) -> str:
    """The rules of values without white space, written anew from `root` on."""
    rules = {name: _TOKEN.findall(body) for name, _, body in _lines(compact)}
    if style is JsonStyle.PYTHON:
        rules |= {name: _TOKEN.findall(body) for name, body in numbers().items() if name in rules}
        rules = {name: [_constant(token) for token in body] for name, body in rules.items()}
    used = _depths(rules)
    space = _WhiteSpace(style is not JsonStyle.COMPACT)
    nullable = _nullable(rules)
    written = [f"{name} ::= {space.within(rules[name], depth, nullable)}" for name, depth in used.items()]
    # a rule that may be nothing takes the white space before it into itself
    led = dict[str, str]()
    while left := sorted(space.leading - led.keys()):
        led |= {name: space.within(rules[name], used[name], nullable, leads=True) for name in left}
    written += [f"{name}_led ::= {body}" for name, body in led.items()]
    return "\n".join([*written, *space.rules()])


def _lines(compact: str) -> list[tuple[str, str, str]]:
    return [line.partition(" ::= ") for line in compact.splitlines() if line.strip()]


def _constant(token: str) -> str:
    """A text in a rule, as Python writes it."""
    if token[0] != '"' or (text := constant(before := _literal(token))) == before:
        return token
    return quoted(text)


def _literal(token: str) -> str:
    """Returns the text that a literal in a rule stands for."""
    return _LITERAL.sub(_character, token[1:-1])


def _character(escape: re.Match[str]) -> str:
    number = escape[1] or escape[2] or escape[3]
    return chr(int(number, 16)) if number else _LETTERS.get(escape[4], escape[4])


# --- white space


@dataclass(frozen=True, order=True)
class NestingDepth:
    """The number of values around a place, at least and at most."""

    least: int
    most: int

    def inside(self, more: int) -> NestingDepth:
        """Returns this nesting, `more` values deeper."""
        return NestingDepth(*(min(max(depth + more, 0), MAX_INDENTED) for depth in (self.least, self.most)))


def _depths(rules: Rules) -> dict[str, NestingDepth]:
    """The rules that `root` needs, and where their values may lie."""
    depths, todo = {"root": NestingDepth(0, 0)}, ["root"]
    while todo:
        name = todo.pop()
        inside = 0
        for token in rules[name]:
            inside += (token in _OPEN) - (token in _CLOSE)
            if token not in rules:
                continue
            here = depths[name].inside(inside)
            known = depths.get(token, here)
            joined = NestingDepth(min(known.least, here.least), max(known.most, here.most))
            if token not in depths or joined != known:
                depths[token] = joined
                todo.append(token)
    return depths


def _nullable(rules: Rules) -> set[str]:
    """The rules of parts that may be nothing."""
    users = defaultdict[str, set[str]](set)
    for name, body in rules.items():
        for part in rules.keys() & body:
            users[part].add(name)
    nullable, todo = set[str](), list(rules)
    while todo:
        name = todo.pop()
        if name not in nullable and _may_be_nothing(rules[name], nullable):
            nullable.add(name)
            todo += users[name]
    return nullable


def _may_be_nothing(body: list[str], nullable: set[str]) -> bool:
    """Whether one of its alternatives, none of them in brackets, may be nothing."""
    nothing = True
    for token, after in zip(body, [*body[1:], "|"], strict=True):
        if token == "|":
            if nothing:
                return True
            nothing = True
        elif token not in ("*", "?", '""') and token[0] != "{":
            nothing &= token in nullable or after in ("*", "?") or after.startswith("{0")
    return nothing


class _WhiteSpace:
    """White space that rules need: which there is, by its depth. Not `spaced`: none."""

    def __init__(self, spaced: bool) -> None:
        self._spaced = spaced
        self._used = set[NestingDepth]()
        self.leading = set[str]()

    def within(self, body: list[str], depth: NestingDepth, nullable: set[str], leads: bool = False) -> str:
        """A rule's right side with white space. `leads`: some stands at its beginning, if anything does."""
        written, inside, before = list[str](), 0, ""
        for i, token in enumerate(body):
            after = body[i + 1] if i + 1 < len(body) else ""
            first = leads and before in ("(", "|", "")
            if first and token not in ('""', "(") and token not in nullable:
                written.append(self._at(depth))
            if token in _CLOSE and before not in _OPEN:
                written.append(self._at(depth.inside(inside - 1)))
            inside += (token in _OPEN) - (token in _CLOSE)
            if self._spaced and (before in _OPEN or first) and token in nullable:
                self.leading.add(token)
                token = f"{token}_led"
            written.append(
                '","' if token in _COMMA else "colon" if token == '":"' and self._spaced else token
            )
            if token in _COMMA or (token in _OPEN and after not in (*_CLOSE, *nullable)):
                written.append(self._at(depth.inside(inside)))
            before = token
        return " ".join(part for part in written if part)

    def _at(self, depth: NestingDepth) -> str:
        if not self._spaced:
            return ""
        if depth.least < depth.most and depth.most >= MAX_INDENTED - 1:
            depth = NestingDepth(0, MAX_INDENTED)  # within itself: one rule for all is compiled sooner
        self._used.add(depth)
        return f"space_{depth.least}_{depth.most}"

    def rules(self) -> list[str]:
        """Nothing, one space, or a new line with what an indenting printer writes there."""
        if not self._spaced:
            return []
        lines = ['colon ::= " "? ":" " "?']
        for depth in sorted(self._used):
            indented = ['""'] if not depth.least else []
            if depth.most:
                least = max(depth.least, 1)
                indented += [f'" "{{{least},{4 * depth.most}}}', rf'"\t"{{{least},{depth.most}}}']
            new_line = rf'"\n" ({" | ".join(indented)})'
            lines.append(f'space_{depth.least}_{depth.most} ::= "" | " " | {new_line}')
        return lines
