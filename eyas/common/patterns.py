"""Regular expressions of texts that stand in another notation, some of whose characters cannot stand there.

What cannot (a tag's first character between tags, a quote within quotes) is left out of classes, and written
as an escape, or refused, where a pattern names it. So what is written for a text that the pattern matches
can be read back. This file knows the expressions that JSON schemas use, and two ways to write one: as an
expression, and as the right side of a rule (GBNF). It refuses to match anything, and what it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

Ranges = list[tuple[int, int]]
"""Characters by their numbers: (first, last), sorted, apart from one another."""

_LAST = 0x10FFFF
_ALL: Ranges = [(1, 0xD7FF), (0xE000, _LAST)]  # no NUL, which rules cannot hold, and no surrogates
_SETS: dict[str, Ranges] = {
    "d": [(0x30, 0x39)],
    "w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "s": [(0x09, 0x0D), (0x20, 0x20)],
}
_NAMED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_TIMES = re.compile(r"\{(\d+)(,(\d*))?\}")
_MOST_TIMES = 99_999
_NUMBERED = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_LETTER_OR_DIGIT = re.compile(r"[0-9A-Za-z]")


class Unheld(Exception):
    """A pattern that no rules can hold to. Its text says why."""


@dataclass(frozen=True)
class Notation:
    """How patterns are written: what stands between parts and alternatives, before a group, for nothing, and
    around characters.
    """

    part: str
    alternative: str
    group: str
    empty: str
    quote: str

    def literal(self, text: str) -> str:
        """This text."""
        return self.quote + "".join(_character(c) for c in text) + self.quote

    def class_of(self, ranges: Ranges) -> str:
        """One of these characters."""
        return "[" + "".join(_range(chr(a), chr(b)) for a, b in ranges) + "]"


RULES = Notation(" ", " | ", "(", '""', '"')
EXPRESSIONS = Notation("", "|", "(?:", "(?:)", "")


def rewritten(pattern: str, never: str, escapes: Mapping[str, str], notation: Notation) -> str:
    """The pattern, written without the characters `never`; `escapes`: what stands for one that it names.

    Raises Unheld for a pattern that cannot be written.
    """
    return _Reader(pattern, never, escapes, notation).alternatives(0)


def _range(first: str, last: str) -> str:
    return _character(first) + ("" if first == last else f"-{_character(last)}")


def _character(character: str) -> str:
    number = ord(character)
    if _LETTER_OR_DIGIT.match(character) or number > 0xFFFF:
        return character
    return f"\\u{number:04x}"


def without(ranges: Ranges, characters: str) -> Ranges:
    """Those that are none of `characters`."""
    for number in map(ord, characters):
        ranges = [
            part
            for a, b in ranges
            for part in ((a, min(b, number - 1)), (max(a, number + 1), b))
            if part[0] <= part[1] and (a, b) != (number, number)
        ]
        ranges = sorted(set(ranges))
    return ranges


def _other(ranges: Ranges) -> Ranges:
    """All characters but these."""
    found, at = list[tuple[int, int]](), 0
    for first, last in [*ranges, (_LAST + 1, _LAST + 1)]:
        if at < first:
            found.append((at, first - 1))
        at = last + 1
    return [(max(a, c), min(b, d)) for a, b in found for c, d in _ALL if max(a, c) <= min(b, d)]


def _joined(ranges: Ranges) -> Ranges:
    found = list[tuple[int, int]]()
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


class _Reader:
    """Reads a pattern from its first character to its last."""

    def __init__(self, pattern: str, never: str, escapes: Mapping[str, str], notation: Notation) -> None:
        self._text = pattern
        self._never = never
        self._escapes = escapes
        self._notation = notation
        self._at = 0

    def alternatives(self, depth: int) -> str:
        """Reads up to the end of the group, or of the pattern."""
        if depth > 32:
            raise Unheld("its groups are nested too deep")
        found = [self._sequence(depth)]
        while self._accept("|"):
            found.append(self._sequence(depth))
        if depth == 0 and self._at < len(self._text):
            raise Unheld("a bracket is closed that is not open")
        return self._notation.alternative.join(found)

    def _sequence(self, depth: int) -> str:
        items = list[str]()
        self._accept("^")
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if self._accept("$"):
                if self._at < len(self._text) and self._text[self._at] not in "|)":
                    raise Unheld("$ is only supported at its end")
                break
            items.append(self._item(depth))
        return self._notation.part.join(items) or self._notation.empty

    def _item(self, depth: int) -> str:
        """One character, class or group, and how often it comes."""
        character = self._text[self._at]
        if character in "*+?^":
            raise Unheld(f"{character} is not supported where it stands")
        self._at += 1
        match character:
            case "(":
                item = self._group(depth)
            case "[":
                item = self._written(self._class())
            case ".":
                item = self._written(without(_ALL, "\n\r\u2028\u2029"))
            case "\\":
                escaped = self._escape()
                item = self._named(escaped) if isinstance(escaped, str) else self._written(escaped)
            case _:
                item = self._named(character)
        times = self._times()
        if times:
            self._accept("?")  # as few as can be: the texts are the same
        return item + times

    def _group(self, depth: int) -> str:
        if self._accept("?") and not self._accept(":"):
            raise Unheld("look-around and named groups are not supported")
        inside = self.alternatives(depth + 1)
        if not self._accept(")"):
            raise Unheld("a bracket is not closed")
        return f"{self._notation.group}{inside})"

    def _times(self) -> str:
        for sign in "*+?":
            if self._accept(sign):
                return sign
        if not (found := _TIMES.match(self._text, self._at)):
            return ""
        self._at = found.end()
        least, most = found[1], found[1] if found[2] is None else found[3]
        if max(len(least), len(most)) > len(str(_MOST_TIMES)):
            raise Unheld(f"a repetition has more than {_MOST_TIMES}")
        if most and int(most) < int(least):
            raise Unheld("a repetition has its numbers in the wrong order")
        return f"{{{least},{most}}}"

    def _named(self, character: str) -> str:
        """A character that the pattern names."""
        if character not in self._never:
            return self._notation.literal(character)
        if character not in self._escapes:
            raise Unheld(f"{character!r} in it cannot be written where it stands")
        return f"{self._notation.group}{self._notation.literal(self._escapes[character])})"

    def _written(self, ranges: Ranges) -> str:
        """A class of characters; where none of them can stand as it is, one of their escapes."""
        if kept := without(ranges, self._never):
            return self._notation.class_of(kept)
        named = [chr(number) for first, last in ranges for number in range(first, last + 1)]
        if not named:
            raise Unheld("a class of it is empty")
        found = [self._named(character) for character in named if character in self._escapes]
        if not found:
            raise Unheld("a class of it has no character that can be written where it stands")
        return f"{self._notation.group}{self._notation.alternative.join(found)})"

    def _class(self) -> Ranges:
        """Reads a class behind its bracket."""
        negated, ranges = self._accept("^"), list[tuple[int, int]]()
        while not self._accept("]"):
            first = self._member()
            if not isinstance(first, str):
                ranges += first
                continue
            last = first
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                end = self._member()
                if not isinstance(end, str) or end < first:
                    raise Unheld("a range in a class is not one")
                last = end
            ranges.append((ord(first), ord(last)))
        found = _other(_joined(ranges))
        return found if negated else _other(found)

    def _member(self) -> str | Ranges:
        if self._at >= len(self._text):
            raise Unheld("a class is not closed")
        character = self._text[self._at]
        self._at += 1
        if character != "\\":
            return character
        return "\b" if self._accept("b") else self._escape()

    def _escape(self) -> str | Ranges:
        """Reads what stands behind a backslash: a character, or a class."""
        if found := _NUMBERED.match(self._text, self._at):
            self._at = found.end()
            number = int(found[1] or found[2] or found[3], 16)
            if number > _LAST or 0xD800 <= number < 0xE000 or number == 0:
                raise Unheld("a character of it is none that text can have")
            return chr(number)
        character = self._text[self._at : self._at + 1]
        self._at += 1
        if character.lower() in _SETS and character:
            ranges = _SETS[character.lower()]
            return ranges if character.islower() else _other(ranges)
        if character in _NAMED:
            return _NAMED[character]
        if not character or _LETTER_OR_DIGIT.match(character):
            raise Unheld(f"\\{character} is not supported")
        return character

    def _accept(self, character: str) -> bool:
        found = self._text.startswith(character, self._at)
        self._at += found
        return found
