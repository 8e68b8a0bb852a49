"""Drafts without a model: what followed where the text stood like this before.

A text that repeats itself (code that is edited, a document that is quoted) says its next tokens itself. The
last tokens of a sequence are looked up in its own prompt and output, and in a text that the caller predicted;
what followed there is the proposal. (Prompt lookup decoding: Saxena, 2023; texts given for reference: LLMA,
Yang et al., 2023; longer matches are trusted more: SuffixDecoding, Oliaro et al., 2024.)

No torch: this is the rule, and when it takes the place of a draft head's proposal. A look is made of a few
passes over arrays, whatever the text: a caller who repeats one word makes none dear. Its fast twin is
`eyas.engine.kernels.drafts.lookup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LONGEST = 8
"""Tokens that are compared: longer matches count as this long."""

SHORTEST = 2
"""A shorter match proposes nothing."""

CERTAIN = 1024
"""The rate of a source whose first draft was always right."""

AT_FIRST = (1024, 896)
"""The rates of the lookup and of a head before anything was verified."""

LAG = 3
"""A rate follows each outcome by this power of 1/2 of its distance."""


class LookupMatch(NamedTuple):
    """A proposal: `tokens`, at least one, after a match of `match` tokens."""

    match: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class SequenceText:
    """A sequence so far: `ids`, of which the first `prompt` are the prompt's, and what its caller predicted.

    The predicted answer stands after the prompt too: until the answer has a token, it matches at its start.
    """

    ids: Sequence[int]
    prompt: int
    predicted: Sequence[int] = ()


def look_up(text: SequenceText, depth: int, *, history: bool = True) -> LookupMatch | None:
    """At most `depth` tokens that followed the longest match; None if there is none.

    The longest match wins. Of equal ones that in the prediction does, nearest to where the answer stands if
    it had been right so far (of two, the later), then the last one in the text itself, which is left out
    unless `history`. A copy of the text may run into what it has just proposed: so a text that repeats
    itself with a period shorter than `depth` goes on.
    """
    answered = len(text.ids) - text.prompt
    matches: list[tuple[int, bool, int]] = []  # match, of the prediction, place of the token that follows
    if text.predicted:
        match, ends = _longest(
            text.ids, searched_prediction(text.ids[: text.prompt], text.predicted), LONGEST
        )
        if match:
            far = np.abs(ends - LONGEST - answered)
            matches.append((match, True, int(ends[far == far.min()][-1]) - LONGEST))
    if history:
        match, ends = _longest(text.ids, text.ids, 1)
        if match:
            matches.append((match, False, int(ends[-1])))
    if not matches:
        return None
    match, predicted, place = max(matches)
    if predicted:
        follows = text.predicted[place : place + depth]
    else:
        period = text.ids[place:]
        follows = [period[i % len(period)] for i in range(depth)]
    return LookupMatch(match, tuple(follows))


def prefers(match: int, lookup: int, head: int) -> bool:
    """Does a match of `match` tokens (0: none) propose, where a head could? By the rates of both sources.

    A match is trusted by match / (match + 1). While nothing is known, it takes one of seven tokens.
    """
    return match > 0 and lookup * match >= head * (match + 1)


def learned(rate: int, right: bool) -> int:
    """The rate, of CERTAIN, after one more first draft of its source."""
    return rate + ((CERTAIN * right - rate) >> LAG)


def searched_prediction(prompt: Sequence[int], predicted: Sequence[int]) -> list[int]:
    """The prediction as it is searched: LONGEST ids before it (-1: the prompt has fewer), then its own."""
    before = list(prompt[-LONGEST:])
    return [-1] * (LONGEST - len(before)) + before + list(predicted)


def _longest(ids: Sequence[int], searched: Sequence[int], first: int) -> tuple[int, np.ndarray]:
    """The longest match of the last ids in `searched`, and where such ones end, ascending: at `first` or
    later, before its end. 0: there is none, or it is too short.
    """
    text, ends, longest = np.asarray(searched, np.int64), np.arange(first, len(searched)), 0
    for back, id in enumerate(reversed(ids[-LONGEST:])):
        further = ends[(ends > back) & (text[ends - 1 - back] == id)]
        if not len(further):
            break
        ends, longest = further, 1 + back
    return (longest, ends) if longest >= SHORTEST else (0, ends)
