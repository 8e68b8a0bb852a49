"""Strings as rules: of some length, of patterns or of none of them, and none of some others."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from eyas.common.grammars import string_rules
from eyas.common.grammars.automata import Automaton, NoText, all_but, both, of_lengths, of_others, of_pattern
from eyas.common.grammars.regex_syntax import UnsupportedPattern, read
from eyas.common.grammars.schemas.document import leave
from eyas.common.grammars.schemas.texts import StringRules
from eyas.common.grammars.string_rules import JSON, of_automaton

_READ_OTHERWISE = re.compile(r"\\[dwsDWSbB]|(?<!\\)\.")
INITIALS = ("aAbBcCdD", "eEfFgGhHiI", "jJkKlLmMnNoO", "pPqQrR", "sStTuU")
"""First characters that tell strings from one another; other ones, and none, are one more class."""


def rules(text: StringRules, name: str, pointer: str) -> dict[str, str]:
    """Right sides of rules by name; `name` writes the strings. Raises UnwritableBranch for what cannot be."""
    if text == StringRules():
        return {name: "basic_string"}
    inner = f"{name}_text"
    try:
        if _is_simple(text):
            lines = string_rules.rules_of(_simple(text), JSON, inner)
        else:
            automaton = _automaton(text)
            if automaton is None:
                raise UnsupportedPattern("no text fits it")
            lines = of_automaton(automaton, JSON, inner)
    except UnsupportedPattern as reason:
        leave(pointer, f"it cannot be followed: {reason}")
    bodies = {line.partition(" ::= ")[0]: line.partition(" ::= ")[2] for line in lines.splitlines()}
    return {**bodies, name: rf'"\"" {inner}'}


def is_empty(text: StringRules) -> bool:
    """Whether there is no such string; one whose automaton is too large may have some."""
    if text == StringRules() or text.is_empty:
        return text.is_empty
    if text.patterns or text.wholes or text.excluded:
        try:
            return _automaton(text) is None
        except UnsupportedPattern:
            return False
    return False


def classes(text: StringRules) -> list[StringRules]:
    """The strings by their first characters: no string is in two of these."""
    if text.initial is not None:
        return [text]
    parts = [replace(text, initial=(initials, True)) for initials in INITIALS]
    return [
        part for part in [*parts, replace(text, initial=("".join(INITIALS), False))] if not is_empty(part)
    ]


def check(text: StringRules, pointer: str) -> None:
    """Raises UnwritableBranch for a pattern that cannot be followed."""
    for pattern, _ in (*text.patterns, *text.wholes):
        try:
            read(pattern)
        except UnsupportedPattern as reason:
            leave(f"{pointer}/pattern", f"the pattern is not supported: {reason}")


def is_exact(pattern: str) -> bool:
    """Whether all readers of patterns agree upon which texts match."""
    return _READ_OTHERWISE.search(pattern) is None


def _is_simple(text: StringRules) -> bool:
    positive = all(positive for _, positive in (*text.patterns, *text.wholes))
    return positive and not text.excluded and text.initial is None


def _simple(text: StringRules) -> string_rules.StringPattern:
    patterns, wholes = ([pattern for pattern, _ in some] for some in (text.patterns, text.wholes))
    return string_rules.StringPattern(tuple(patterns), tuple(wholes), text.least, text.most)


@lru_cache(512)
def _automaton(text: StringRules) -> Automaton | None:
    """Builds the automaton of the strings; None: there are none. Raises UnsupportedPattern for too many
    states.
    """
    parts = [of_others(sorted(text.excluded))]
    if text.initial is not None:
        initials, expected = text.initial
        parts.append(
            of_pattern(read(f"[{initials}][\\s\\S]*" if expected else f"([^{initials}][\\s\\S]*)?"), False)
        )
    for patterns, search in ((text.patterns, True), (text.wholes, False)):
        for pattern, expected in patterns:
            one = of_pattern(read(pattern), search)
            if not expected and not is_exact(pattern):
                raise UnsupportedPattern(
                    "its classes are read in more than one way, so it cannot be what must not match"
                )
            parts.append(one if expected else all_but(one))
    whole = parts[0]
    try:
        for part in parts[1:]:
            whole = both(whole, part)
        return of_lengths(whole, text.least, text.most) if text.least or text.most is not None else whole
    except NoText:
        return None
