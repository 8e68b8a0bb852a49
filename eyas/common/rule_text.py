"""xgrammar's rules as it prints them, with classes of characters that let through what they should not.

In bytes, its classes hold halves of surrogate pairs, which no text has: decoded, they are three characters,
so that an answer would not be what its grammar says. It knows how classes are printed, and refuses to know
what rules mean.
"""

from __future__ import annotations

import re

_PARTS = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]', re.DOTALL)
_TO_THE_LAST = re.compile(r"(\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\.|[^\\])-\\U0010ffff", re.DOTALL)


def of_characters(rules: str) -> str:
    """Rules whose classes hold characters alone, where they are all but some, or go up to the last one."""
    return _PARTS.sub(lambda part: _whole(part[0]), rules)


def _whole(part: str) -> str:
    if part.startswith("[^"):
        return rf"{part[:-1]}\ud800-\udfff]"
    return _TO_THE_LAST.sub(_split, part) if part[0] == "[" else part


def _split(range: re.Match[str]) -> str:
    """A range up to the last character, without the halves in it."""
    first = range[1]
    if first.startswith(r"\u") and first >= r"\ud800":
        return range[0]
    return rf"{first}-\ud7ff\ue000-\U0010ffff"
