"""xgrammar's rules as it prints them, without halves of surrogate pairs, which no text has.

The library's classes hold them as bytes that decode to three characters, so that an answer would not be what
its grammar says. Only literals and classes are read; rules stay as they are.
"""

from __future__ import annotations

import re

from eyas.common.errors import InvalidRequest

_PARTS = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]', re.DOTALL)
_HALF = re.compile(r"(?P<half>\\u(?:d[89a-f])[0-9a-f]{2})|\\.", re.DOTALL)
_ITEM = r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8}|\\.|[^\\]"
_ITEMS = re.compile(rf"(?P<first>{_ITEM})(?:-(?P<last>{_ITEM}))?", re.DOTALL)
_FIRST_HALF, _LAST_HALF = 0xD800, 0xDFFF


def of_characters(rules: str) -> str:
    """Rules of the same texts. Raises InvalidRequest for a literal with a half, and a class of halves."""
    return _PARTS.sub(lambda part: _whole(part[0]), rules)


def _whole(part: str) -> str:
    if part.startswith("[^"):
        return rf"{part[:-1]}\ud800-\udfff]"
    if part[0] == "[":
        return f"[{_ITEMS.sub(_without_halves, part[1:-1]) or _refuse(part)}]"
    for escape in _HALF.finditer(part):
        if escape["half"]:
            _refuse(part)
    return part


def _without_halves(items: re.Match[str]) -> str:
    """A character or a range of a class, without the halves in it."""
    first, last = items["first"], items["last"] or items["first"]
    if _code(last) < _FIRST_HALF or _code(first) > _LAST_HALF:
        return items[0]
    below = rf"{first}-\ud7ff" if _code(first) < _FIRST_HALF else ""
    return below + (rf"\ue000-{last}" if _code(last) > _LAST_HALF else "")


def _code(item: str) -> int:
    """The character's number; of a short escape some number that is as far from halves."""
    return int(item[2:], 16) if item[:2] in (r"\x", r"\u", r"\U") else ord(item[-1])


def _refuse(part: str) -> str:
    raise InvalidRequest(f"{part:.40} holds half of a surrogate pair, which is no text", param="grammar")
