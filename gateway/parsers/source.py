"""The text of an answer, read by a generator that waits where it needs more.

A parser is written as if the whole text were there: it says `yield from` for every look at the text, and the
generator rests until the text has come. What it finds can therefore not depend on how the text is cut, and
each character is looked at a bounded number of times.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
"""A reading under way: it yields wherever it waits for more text, and returns a T."""
Sink = Callable[[str], None]

_SCALAR = re.compile(r"[-+.\w]+")
SPACE = re.compile(r"\s+")
MOST_SPACE = 64  # characters that are looked past to see what follows
_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_SPACE = re.compile(r"[ \t\n\r]+")
_CLOSES = {"}": "{", "]": "["}

# What may come next. Of the last two, an end may come instead of the first.
_VALUE, _KEY, _COLON, _MORE, _VALUE_OR_END, _KEY_OR_END = range(6)


class MalformedOutput(Exception):
    """The text is not what the format says."""


class CutShort(Exception):
    """The text ended in the middle of what was read."""


def ignore(text: str) -> None:
    """A sink for text that means nothing."""


class ParsedText:
    """The text so far. `consumed`: how many characters have been read.

    Between `keep` and `forget` the text that is read is also kept, so that what turns out to be no call can
    be given back, without the `markers` that stand in it: these are never content.
    """

    def __init__(self, markers: tuple[str, ...] = ()) -> None:
        self._markers = markers
        self.consumed = 0
        self.ended = False
        self._text = ""
        self._at = 0
        self._recorded: list[str] | None = None

    def push(self, text: str) -> None:
        """Adds text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def keep(self) -> None:
        """Begins to keep what is read."""
        self._recorded = []

    def forget(self) -> str:
        """Ends that; gives the text that was kept, with a space in place of each marker: what stood around
        one makes no other.
        """
        text, self._recorded = "".join(self._recorded or ()), None
        return _any_of(self._markers).sub(" ", text) if self._markers else text

    def back(self, text: str) -> None:
        """Makes `text`, which was read last, unread."""
        self.consumed -= len(text)
        self._text, self._at = text + self._text[self._at :], 0
        if self._recorded is not None:
            self._recorded = ["".join(self._recorded).removesuffix(text)]

    # --- readings; each looks at the text from where the last one ended ---

    def peek(self) -> Wait[str]:
        """The next character, which stays unread; "" at the end of the text."""
        while self._at == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def accept(self, literal: str) -> Wait[bool]:
        """Whether the text goes on with `literal`, which is then read."""
        matches = yield from self._is_next(literal)
        if matches:
            self._take(len(literal))
        return matches

    def skip(self, marker: str) -> Wait[bool]:
        """Whether the text goes on with `marker`, which is then read and never recorded."""
        matches = yield from self._is_next(marker)
        if matches:
            self._at += len(marker)
            self.consumed += len(marker)
        return matches

    def expect(self, literal: str) -> Wait[None]:
        """Reads `literal`. Raises MalformedOutput, or CutShort at the end of the text, if it is not there."""
        if not (yield from self.accept(literal)):
            raise CutShort if self.ends_within(literal) else MalformedOutput

    def run(self, pattern: re.Pattern[str]) -> Wait[str]:
        """Reads the characters that go on matching `pattern`, a set of characters with a plus."""
        parts = []
        while True:
            if match := pattern.match(self._text, self._at):
                parts.append(self._take(match.end() - self._at))
            if self._at < len(self._text) or self.ended:
                return "".join(parts)
            yield

    def space(self) -> Wait[str]:
        """Reads white space."""
        return (yield from self.run(SPACE))

    def upto(self, markers: tuple[str, ...], sink: Sink, cut: Sink | None = None) -> Wait[str]:
        """Gives `sink` the text before the first of `markers`, and reads that one.

        Returns the marker; "" if the text ends without one: what it ends with may be the beginning of one,
        and goes to `cut` if given. No marker may begin with another.
        """
        while True:
            if markers and (match := _any_of(markers).search(self._text, self._at)):
                sink(self._take(match.start() - self._at))
                return self._take(len(match.group()))
            pending = _partial_marker(self._text, self._at, markers)
            sink(self._take(len(self._text) - self._at - pending))
            if self.ended:
                (cut or sink)(self._take(pending))
                return ""
            yield

    def leads_to(self, literals: tuple[str, ...]) -> Wait[bool]:
        """Whether one of `literals` comes next, behind a little white space or none, or the text ends. Reads
        nothing.
        """
        while True:
            near = self._text[self._at : self._at + MOST_SPACE + 1]
            if rest := near.lstrip():
                at = self._at + len(near) - len(rest)
                if self._text.startswith(literals, at):
                    return True
                rest = self._text[at : at + max(map(len, literals))]
                if not any(literal.startswith(rest) for literal in literals):
                    return False
            elif len(near) > MOST_SPACE:
                return False
            if self.ended:
                return True
            yield

    def ends_within(self, *literals: str) -> bool:
        """Whether the text has ended, and what is left is a beginning of one of `literals`, or nothing."""
        return self.ended and any(self._may_become(literal) for literal in literals)

    def rest(self) -> None:
        """Reads all that has come."""
        self._take(len(self._text) - self._at)

    def looks(self, pattern: re.Pattern[str], most: int) -> Wait[bool]:
        """Whether the next `most` characters, or all there are, begin with a match. Reads nothing."""
        while len(self._text) - self._at < most and not self.ended:
            yield
        return pattern.match(self._text, self._at, self._at + most) is not None

    def whole_json(self) -> Wait[str]:
        """Reads a JSON object, array or string as it is written, with line breaks in its strings or without.
        "": none comes, and nothing is read.
        """
        scan, parts = JsonScan(bears_breaks=True), list[str]()
        while not scan.over:
            end = scan.find(self._text, self._at)
            parts.append(self._take(end - self._at))
            if scan.failed or (self.ended and not scan.over):
                self.back("".join(parts))
                return ""
            if not scan.over:
                yield
        return "".join(parts)

    def json(self, sink: Sink, most: int | None = None) -> Wait[None]:
        """Gives `sink` one JSON value as it is written, once its first character is there; line breaks and
        the like in strings, which models forget to escape, are escaped.

        Objects and arrays end with their last bracket; numbers and words in them are not checked. Raises
        MalformedOutput where the text is no such value, or one of more than `most` characters: what is wrong
        stays unread. Cut if the text ends before the value does.
        """
        first = yield from self.peek()
        if not first or first not in '{["':
            scalar = yield from self.run(_SCALAR)
            if not scalar:
                raise MalformedOutput if first else CutShort
            sink(scalar)
            return
        scan, left = JsonScan(bears_breaks=True), sys.maxsize if most is None else most
        while True:
            at = self._at
            end = scan.find(self._text, at) - scan.failed
            if end - at > left:
                self._take(left)
                raise MalformedOutput
            left -= end - at
            sink(_unbroken(self._take(end - at), [(place - at, escaped) for place, escaped in scan.breaks]))
            if scan.over:
                return
            if scan.failed:
                raise MalformedOutput
            if self.ended:
                raise CutShort
            yield

    def _is_next(self, literal: str) -> Wait[bool]:
        while not self._text.startswith(literal, self._at):
            if self.ended or not self._may_become(literal):
                return False
            yield
        return True

    def _may_become(self, literal: str) -> bool:
        """Whether all that is left of the text is a beginning of `literal`."""
        return literal.startswith(self._text[self._at : self._at + len(literal)])

    def _take(self, length: int) -> str:
        text = self._text[self._at : self._at + length]
        self._at += length
        self.consumed += length
        if self._recorded is not None:
            self._recorded.append(text)
        return text


def unbroken(value: str) -> str:
    """A JSON value whose strings may have line breaks and the like in them, with these escaped."""
    scan = JsonScan(bears_breaks=True)
    scan.find(value, 0)
    return _unbroken(value, scan.breaks)


def _unbroken(text: str, breaks: list[tuple[int, bool]]) -> str:
    """The text with escapes in the place of these characters. Behind a backslash only its rest is missing."""
    parts, at = [], 0
    for place, is_escaped in breaks:
        escape = json.dumps(text[place])[1:-1]
        parts += [text[at:place], escape[1:] if is_escaped else escape]
        at = place + 1
    return "".join([*parts, text[at:]])


@lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


@lru_cache(maxsize=64)
def _first_of(markers: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    """Returns a pattern of the markers' first characters, and the length of the longest marker."""
    firsts = "".join(sorted({re.escape(marker[0]) for marker in markers}))
    return re.compile(f"[{firsts}]"), max(map(len, markers))


def _partial_marker(text: str, start: int, markers: tuple[str, ...]) -> int:
    """How many of the last characters of `text` may be the beginning of a marker."""
    if not markers:
        return 0
    first, longest = _first_of(markers)
    at = max(start, len(text) - longest + 1)
    while match := first.search(text, at):
        at = match.start()
        if any(marker.startswith(text[at:]) for marker in markers):
            return len(text) - at
        at += 1
    return 0


class JsonScan:
    """`over`: the value has ended; `failed`: no value begins so.

    `bears_breaks`: line breaks and the like may stand in strings, which JSON has as escapes only; `breaks`:
    where they stand in the text of the last `find`, and whether a backslash stands before.
    """

    def __init__(self, bears_breaks: bool = False) -> None:
        self.over = self.failed = False
        self.breaks: list[tuple[int, bool]] = []
        self._bears_breaks = bears_breaks
        self._open: list[str] = []
        self._next = _VALUE
        self._in_string = self._escaped = False

    def find(self, text: str, at: int) -> int:
        """Goes on from `at` to where the value ends or fails, or to the end of the text; gives that place."""
        self.breaks = []
        while at < len(text) and not (self.over or self.failed):
            at = self._characters(text, at) if self._in_string else self._structure(text, at)
        return at

    def _characters(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            if text[at] < " ":
                self._break(at, True)
            return at + 1
        hit = _IN_STRING.search(text, at)
        if not hit:
            return len(text)
        match hit.group():
            case '"':
                self._in_string = False
                self._ended()
            case "\\":
                self._escaped = True
            case _:
                self._break(hit.start(), False)
        return hit.end()

    def _break(self, at: int, is_escaped: bool) -> None:
        self.failed = not self._bears_breaks
        self.breaks.append((at, is_escaped))

    def _structure(self, text: str, at: int) -> int:
        if hit := _SPACE.match(text, at):
            return hit.end()
        if self._open and (hit := _SCALAR.match(text, at)):
            self.failed = self._next in (_KEY, _COLON, _KEY_OR_END)
            self._next = _MORE
            return at + 1 if self.failed else hit.end()
        self.failed = not self._pass(text[at])
        return at + 1

    def _pass(self, character: str) -> bool:
        """Whether the character may come next, which is then what has come."""
        match character:
            case '"':
                self._in_string = True
                return self._next not in (_COLON, _MORE)
            case "{" | "[":
                can = self._next in (_VALUE, _VALUE_OR_END)
                self._open.append(character)
                self._next = _KEY_OR_END if character == "{" else _VALUE_OR_END
                return can
            case "}" | "]":
                can = self._next in (_MORE, _VALUE_OR_END, _KEY_OR_END)
                if not can or not self._open or self._open.pop() != _CLOSES[character]:
                    return False
                self._next = _MORE  # a key is never in brackets
                self._ended()
                return True
            case ":":
                can, self._next = self._next == _COLON, _VALUE
                return can
            case ",":
                can = self._next == _MORE and bool(self._open)
                self._next = _KEY if self._open and self._open[-1] == "{" else _VALUE
                return can
        return False

    def _ended(self) -> None:
        """A string or a bracket has come to its end."""
        self.over = not self._open
        self._next = _COLON if self._next in (_KEY, _KEY_OR_END) and not self.over else _MORE
