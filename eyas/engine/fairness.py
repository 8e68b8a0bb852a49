"""Whose turn it is: fair between callers, then between the calls of one caller, then in order of arrival.

A share is what one call has: its sequences that run, and those whose pages are here or coming. It knows
counts only: neither slots nor pages, nor how a sequence gives its place up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from eyas.engine.sequence import Generation

Turn = tuple[int, int, bool, float]  # smaller: earlier


class Shares:
    """Sequences by caller and by call. `holders`: the generation of each, once for every sequence."""

    def __init__(self, holders: Iterable[Generation]) -> None:
        self._calls = Counter(generation.share for generation in holders)
        self._callers: Counter[str] = Counter()
        for (caller, _), count in self._calls.items():
            self._callers[caller] += count

    def add(self, generation: Generation, count: int = 1) -> None:
        self._calls[generation.share] += count
        self._callers[generation.request.caller] += count

    def held(self, generation: Generation) -> tuple[int, int]:
        """Sequences of its caller, and of its call."""
        return self._callers[generation.request.caller], self._calls[generation.share]

    def turn(self, generation: Generation, delay: float = 0.0) -> Turn:
        """Who has least comes first; then who has begun; then who came first, `delay` seconds added."""
        return *self.held(generation), not generation.has_begun, generation.arrived + delay

    def owing(self, claimant: Generation, gain: int) -> set[tuple[str, str]]:
        """Calls that have no less than the claimant even when one of theirs ends and it has `gain` more.

        Callers are compared with callers, and calls with calls of the same caller. So with every sequence
        that changes hands the sum of squares of the callers' shares falls, or it stays while that of the
        calls' falls: nothing is handed back.
        """
        own, (caller_has, call_has) = claimant.request.caller, self.held(claimant)
        richer = {caller for caller, count in self._callers.items() if count > caller_has + gain} - {own}
        return {
            (caller, call)
            for (caller, call), count in self._calls.items()
            if caller in richer or (caller == own and count > call_has + gain)
        }
