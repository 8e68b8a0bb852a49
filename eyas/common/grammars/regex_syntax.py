"""Regular expressions, read: what a pattern says, as a tree.

The notation is ECMA-262's as far as Python's `re` reads it alike, with `\\A`, `\\Z` and named groups from
`re`. What automata cannot follow (look-around, references to groups, flags) is refused by its name, and so is
an escape that nothing defines. Nothing is matched here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from eyas.common.grammars.characters import ALL, DOT, LAST, NAMED, NAMED_BY_SOME, Ranges, joined, of, others

MAX_DEPTH = 64
_NAMES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_TIMES = re.compile(r"\{(\d+)(,(\d*))?\}")
_MOST_TIMES = 99_999
_NUMBERED = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_PAIR = re.compile(r"u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_LETTER_OR_DIGIT = re.compile(r"[0-9A-Za-z]")
_NAME = re.compile(r"P?<[A-Za-z_][A-Za-z0-9_]*>")
_REFUSED_GROUPS = (
    ("?=", "a look-ahead (?=...)"),
    ("?!", "a look-ahead (?!...)"),
    ("?<=", "a look-behind (?<=...)"),
    ("?<!", "a look-behind (?<!...)"),
    ("?P=", "a reference to a group (?P=...)"),
    ("?P>", "a reference to a group (?P>...)"),
    ("?>", "an atomic group (?>...)"),
    ("?#", "a comment (?#...)"),
    ("?(", "a condition (?(...)...)"),
)


class UnsupportedPattern(Exception):
    """A pattern that no rules can hold to. Its text says why."""


class EdgeNode(Enum):
    """A place between two characters."""

    START = "^"
    END = "$"
    WORD = r"\b"
    NO_WORD = r"\B"


@dataclass(frozen=True)
class CharNode:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class RegexSequence:
    """Parts one after the other; none: nothing."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class EitherNode:
    """One of some parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class RepeatNode:
    """A part some times; `most` None: without end."""

    part: Node
    least: int
    most: int | None


Node = CharNode | RegexSequence | EitherNode | RepeatNode | EdgeNode

ANY_TEXT = RepeatNode(CharNode(ALL), 0, None)


def read(pattern: str) -> Node:
    """The tree of a pattern. Raises UnsupportedPattern if it is malformed or cannot be followed."""
    reader = _PatternReader(pattern)
    tree = reader.alternatives(0)
    reader.end()
    return tree


class _PatternReader:
    """Reads a pattern from its first character to its last."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def end(self) -> None:
        if self._at < len(self._text):
            raise UnsupportedPattern("a bracket is closed that is not open")

    def alternatives(self, depth: int) -> Node:
        """Reads up to the end of the group, or of the pattern."""
        if depth > MAX_DEPTH:
            raise UnsupportedPattern("its groups are nested too deep")
        branches = [self._sequence(depth)]
        while self._accept("|"):
            branches.append(self._sequence(depth))
        return branches[0] if len(branches) == 1 else EitherNode(tuple(branches))

    def _sequence(self, depth: int) -> Node:
        parts = list[Node]()
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._item(depth))
        return parts[0] if len(parts) == 1 else RegexSequence(tuple(parts))

    def _item(self, depth: int) -> Node:
        """One character, class, place or group, and how often it comes."""
        part = self._part(depth)
        times = self._times()
        if times is None:
            return part
        if isinstance(part, EdgeNode):
            raise UnsupportedPattern(f"{part.value} cannot be repeated")
        self._accept("?")  # as few as can be: the texts are the same
        if self._text[self._at : self._at + 1] in ("*", "+", "?") and self._at < len(self._text):
            raise UnsupportedPattern(f"{self._text[self._at]} is not supported behind a repetition")
        return RepeatNode(part, *times)

    def _part(self, depth: int) -> Node:
        character = self._text[self._at]
        if character in "*+?":
            raise UnsupportedPattern(f"{character} has nothing before it to repeat")
        self._at += 1
        match character:
            case "(":
                return self._group(depth)
            case "[":
                return CharNode(self._class())
            case ".":
                return CharNode(DOT)
            case "^" | "$":
                return EdgeNode(character)
            case "\\":
                return self._edge() or self._chars(self._escape())
        return self._chars(character)

    def _chars(self, chars: str | Ranges) -> CharNode:
        return CharNode(of(chars) if isinstance(chars, str) else chars)

    def _edge(self) -> EdgeNode | None:
        """A place behind a backslash; `\\A` and `\\Z` are Python's words of `^` and `$`."""
        for letter, edge in (
            ("b", EdgeNode.WORD),
            ("B", EdgeNode.NO_WORD),
            ("A", EdgeNode.START),
            ("Z", EdgeNode.END),
        ):
            if self._accept(letter):
                return edge
        return None

    def _group(self, depth: int) -> Node:
        for begin, name in _REFUSED_GROUPS:
            if self._text.startswith(begin, self._at):
                raise UnsupportedPattern(f"{name} is not supported")
        if self._accept("?") and not self._accept(":"):
            match = _NAME.match(self._text, self._at)
            if not match:
                raise UnsupportedPattern(f"(?{self._text[self._at : self._at + 1]} is not supported")
            self._at = match.end()
        inside = self.alternatives(depth + 1)
        if not self._accept(")"):
            raise UnsupportedPattern("a bracket is not closed")
        return inside

    def _times(self) -> tuple[int, int | None] | None:
        for sign, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._accept(sign):
                return times
        if self._text.startswith("{,", self._at):
            raise UnsupportedPattern("{, is not supported: write {0,")
        if not (match := _TIMES.match(self._text, self._at)):
            return None
        self._at = match.end()
        least, most = match[1], match[1] if match[2] is None else match[3]
        if max(len(least), len(most)) > len(str(_MOST_TIMES)):
            raise UnsupportedPattern(f"a repetition has more than {_MOST_TIMES}")
        if most and int(most) < int(least):
            raise UnsupportedPattern("a repetition has its numbers in the wrong order")
        return int(least), int(most) if most else None

    def _class(self) -> Ranges:
        """Reads a class behind its bracket."""
        negated, ranges = self._accept("^"), list[tuple[int, int]]()
        if self._text.startswith("]", self._at):
            raise UnsupportedPattern("a class that begins with ] is not supported: write \\]")
        while not self._accept("]"):
            first = self._member(negated)
            if not isinstance(first, str):
                ranges += first
                continue
            last = first
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                end = self._member(negated)
                if not isinstance(end, str) or end < first:
                    raise UnsupportedPattern("a range in a class is not one")
                last = end
            ranges.append((ord(first), ord(last)))
        chars = joined(ranges)
        return others(chars) if negated else chars

    def _member(self, negated: bool) -> str | Ranges:
        if self._at >= len(self._text):
            raise UnsupportedPattern("a class is not closed")
        character = self._text[self._at]
        self._at += 1
        if character != "\\":
            return character
        return "\b" if self._accept("b") else self._escape(NAMED_BY_SOME if negated else NAMED)

    def _escape(self, named: Mapping[str, Ranges] = NAMED) -> str | Ranges:
        """Reads what stands behind a backslash: a character, or a class."""
        if match := _PAIR.match(self._text, self._at):
            self._at = match.end()
            return chr(0x10000 + ((int(match[1], 16) - 0xD800) << 10) + int(match[2], 16) - 0xDC00)
        if match := _NUMBERED.match(self._text, self._at):
            self._at = match.end()
            number = int(match[1] or match[2] or match[3], 16)
            if number > LAST or 0xD800 <= number < 0xE000 or number == 0:
                raise UnsupportedPattern(f"\\{match[0]} is no character that text can have")
            return chr(number)
        character = self._text[self._at : self._at + 1]
        self._at += 1
        if character in named:
            return named[character]
        if character in _NAMES:
            return _NAMES[character]
        if character.isdigit() and character != "0":
            raise UnsupportedPattern(f"a reference to a group \\{character} is not supported")
        if not character:
            raise UnsupportedPattern("a backslash ends it")
        if _LETTER_OR_DIGIT.match(character):
            raise UnsupportedPattern(f"the escape \\{character} is not supported")
        return character

    def _accept(self, character: str) -> bool:
        accepted = self._text.startswith(character, self._at)
        self._at += accepted
        return accepted
