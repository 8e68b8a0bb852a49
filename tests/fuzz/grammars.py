"""Random patterns, walked through at random, each text judged by `re`: `python -m tests.fuzz.grammars`.

A pattern stands in a JSON string, with lengths or without, or by itself. What a mask lets through must match;
and of texts drawn at random, those that match must be let through, unless the pattern has a name for a set
of characters that readers take differently.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator

from eyas.common.grammars.regex_syntax import UnsupportedPattern
from eyas.common.grammars.string_rules import JSON, PLAIN, StringPattern, rules_of
from tests.fuzz.walks import Walker, campaign

_ATOMS = (
    "a",
    "b",
    "c",
    "1",
    ".",
    "[ab]",
    "[^a]",
    "[a-c1]",
    r"\d",
    r"\w",
    r"\s",
    r"\D",
    r"\W",
    r"\S",
    r"\.",
    '"',
    "é",
)
_ATOMS += (r"\\", r"\n", "[^\\w]", r"[\s\S]", "-", "x")
_PLACES = ("^", "$", r"\b", r"\B", r"\A", r"\Z")
_TIMES = ("*", "+", "?", "{2}", "{0,2}", "{1,3}", "{2,}", "*?", "+?", "??")
_NARROWED = re.compile(r"\\[wWdDsSbB]|\.")
_LETTERS = 'ab1cx"\\-é \n.'


def random_pattern(rng: random.Random, depth: int = 0) -> str:
    """A pattern of every kind of part."""
    parts = []
    for _ in range(rng.randrange(1, 4)):
        draw = rng.random()
        if draw < 0.12:
            parts.append(rng.choice(_PLACES))
            continue
        part = rng.choice(_ATOMS)
        if draw > 0.6 and depth < 3:
            between = "|".join(random_pattern(rng, depth + 1) for _ in range(rng.randrange(1, 4)))
            part = f"({'?:' * rng.randrange(2)}{between})"
        if rng.random() < 0.35:
            part += rng.choice(_TIMES)
        parts.append(part)
    return "".join(parts)


def _matches(pattern: str, text: StringPattern, found: str) -> bool:
    judge = re.fullmatch if text.anchored else re.search
    ends = text.most is None or len(found) <= text.most
    return bool(judge(pattern, found)) and len(found) >= text.least and ends


def faults(walks: int, seed: int) -> Iterator[str]:
    """What went wrong, in words."""
    rng = random.Random(f"grammars/{seed}")
    walker, left = Walker(rng), walks
    while left > 0:
        pattern, least = random_pattern(rng), rng.choice((0, 0, 0, 1, 3))
        inside, most = rng.random() < 0.8, rng.choice((None, None, least + 4))
        text = StringPattern((pattern,), (), least, most) if inside else StringPattern((), (pattern,))
        try:
            re.compile(pattern)
            rules = rules_of(text, JSON if inside else PLAIN, "text" if inside else "root")
        except (UnsupportedPattern, re.error):
            continue
        compiled = walker.compile(f'root ::= "\\"" text\n{rules}' if inside else rules)
        for _ in range(8):
            left -= 1
            found = walker.walk(compiled)
            if found is not None and not _matches(pattern, text, json.loads(found) if inside else found):
                yield f"{text} lets {found!r} through"
        if _NARROWED.search(pattern):
            continue
        for _ in range(8):
            drawn = "".join(rng.choices(_LETTERS, k=rng.randrange(6)))
            if _matches(pattern, text, drawn) and not drawn.endswith("\n"):
                written = json.dumps(drawn, ensure_ascii=False) if inside else drawn
                if not walker.takes(compiled, written):
                    yield f"{text} does not let {written!r} through"


if __name__ == "__main__":
    campaign(faults, __doc__)
