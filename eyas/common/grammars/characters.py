"""Sets of characters, as sorted ranges of their numbers, and those that regular expressions have names for.

Names of sets mean ECMA-262's (digits and letters are ASCII's), less what readers who go by Unicode take
otherwise: who checks a text with either finds it right. NUL and halves of surrogate pairs are in no set:
rules cannot hold the one, and text does not have the others.
"""

from __future__ import annotations

Ranges = tuple[tuple[int, int], ...]
"""Characters by their numbers: (first, last), sorted, apart from one another."""

LAST = 0x10FFFF
ALL: Ranges = ((1, 0xD7FF), (0xE000, LAST))


def joined(ranges: list[tuple[int, int]]) -> Ranges:
    """The ranges in their order, those that touch made one, without what is no character."""
    merged = list[tuple[int, int]]()
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return common(tuple(merged), ALL)


def common(one: Ranges, other: Ranges) -> Ranges:
    """Characters that are in both."""
    shared, i, j = list[tuple[int, int]](), 0, 0
    while i < len(one) and j < len(other):
        first, last = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if first <= last:
            shared.append((first, last))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return tuple(shared)


def others(ranges: Ranges) -> Ranges:
    """All characters but these."""
    gaps, at = list[tuple[int, int]](), 0
    for first, last in (*ranges, (LAST + 1, LAST + 1)):
        if at < first:
            gaps.append((at, first - 1))
        at = last + 1
    return common(tuple(gaps), ALL)


def without(ranges: Ranges, characters: str) -> Ranges:
    """Removes `characters`."""
    return common(ranges, others(of(characters)))


def of(characters: str) -> Ranges:
    """The ranges of `characters`."""
    return joined([(ord(character), ord(character)) for character in characters])


def size(ranges: Ranges) -> int:
    """How many characters there are."""
    return sum(last - first + 1 for first, last in ranges)


WORD = joined([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
DIGIT = joined([(0x30, 0x39)])
DOT = others(of("\n\r\u2028\u2029"))
_SPACE = joined([(0x09, 0x0D), (0x2000, 0x200A), *of(" \xa0\u1680\u2028\u2029\u202f\u205f\u3000")])
NO_WORD = joined(
    [
        *common(others(WORD), ((1, 0xA9), (0xAB, 0xB1))),
        *of("\xb4\xb6\xb7\xb8\xbb\xbf\xd7\xf7"),
        *((0x2000, 0x206F), (0x20A0, 0x20C0), (0x2190, 0x23FF), (0x2500, 0x2775), (0x2794, 0x27BF)),
        *((0x3001, 0x3004), (0x3008, 0x3020), (0xE000, 0xF8FF), (0x1F300, 0x1FAFF)),
    ]
)
"""Signs that no standard takes for letters or digits: not all of them, but those in use."""
_NO_DIGIT = joined(
    [(1, 0x2F), (0x3A, 0x65F), (0x1E00, 0xA61F), (0xAC00, 0xD7FF), (0xE000, 0xF8FF), (0x1F000, 0x1FAFF)]
)
_NO_SPACE = others(joined([*_SPACE, (0x1C, 0x1F), *of("\x85\ufeff")]))
NAMED = {"d": DIGIT, "w": WORD, "s": _SPACE, "D": _NO_DIGIT, "W": NO_WORD, "S": _NO_SPACE}
"""Character classes behind a backslash, by letter, as ECMA-262 and Unicode agree upon them."""
NAMED_BY_SOME = {name: others(NAMED[name.swapcase()]) for name in NAMED}
"""The classes as either has them: a negated class leaves all of these out."""
