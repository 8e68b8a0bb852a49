"""Looks for the end of a JSON object, array or string whose characters come in parts.

It follows brackets, strings and what may follow what, so that it fails where no value can go on. Numbers and
words are not judged, and no value is built: who wants it reads the text again.
"""

from __future__ import annotations

import re

_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_SPACE = re.compile(r"[ \t\n\r]+")
_SCALAR = re.compile(r"[-+.\w]+")
_CLOSES = {"}": "{", "]": "["}

# What may come next. Of the last two, an end may come instead of the first.
_VALUE, _KEY, _COLON, _MORE, _VALUE_OR_END, _KEY_OR_END = range(6)


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
