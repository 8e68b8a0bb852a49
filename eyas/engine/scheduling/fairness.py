"""Whose turn it is: fair between callers, then between the calls of one caller, then in order of arrival.

A share is what one call has: its sequences that run, those whose pages are here or coming, and those that
slots are kept for. It knows counts and times only: neither slots nor pages, nor how a sequence gives its
place up.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Iterable, Iterator

from eyas.engine.batch.sequence import Generation, Sequence

Call = tuple[str, str]  # caller, call
Turn = tuple[int, int, bool, float]  # smaller: earlier
Entry = tuple[bool, float, int, Sequence]  # smaller: earlier in its call; no two have the same number


class Shares:
    """Sequences by caller and by call."""

    def __init__(self) -> None:
        self._calls: dict[Call, int] = {}
        self._callers: dict[str, int] = {}

    def plus(self, others: Iterable[Generation]) -> Shares:
        """These, and one sequence more for each of `others`, in counts of their own."""
        shares = Shares()
        shares._calls, shares._callers = dict(self._calls), dict(self._callers)
        for generation in others:
            shares.add(generation)
        return shares

    def add(self, generation: Generation, count: int = 1) -> None:
        call = generation.share
        calls = self._calls[call] = self._calls.get(call, 0) + count
        callers = self._callers[call[0]] = self._callers.get(call[0], 0) + count
        if not calls:
            del self._calls[call]
        if not callers:
            del self._callers[call[0]]

    def held(self, call: Call) -> tuple[int, int]:
        """Sequences of its caller, and its own."""
        return self._callers.get(call[0], 0), self._calls.get(call, 0)

    def turn(self, generation: Generation) -> Turn:
        """Who has least comes first; then who has begun; then who came first."""
        return *self.held(generation.share), not generation.has_begun, generation.arrived

    def owing(self, claimant: Generation, gain: int) -> set[Call]:
        """Calls that, with one place less, would hold no less than the claimant with `gain` places more.

        Callers are compared with callers, and calls with calls of the same caller. So with every sequence
        that changes hands the sum of squares of the callers' shares falls, or it stays while that of the
        calls' falls: nothing is handed back.
        """
        own, (caller_has, call_has) = claimant.share[0], self.held(claimant.share)
        richer = {caller for caller, count in self._callers.items() if count > caller_has + gain} - {own}
        return {
            (caller, call)
            for (caller, call), count in self._calls.items()
            if caller in richer or (caller == own and count > call_has + gain)
        }


class Queue:
    """Sequences that wait, in a line for each call: so a look at who is next is a look at each call.

    A prompt of n tokens that has not begun lets shorter ones go first that come within
    n / `yield_tokens_per_s` seconds (0: no prompt yields).
    """

    def __init__(self, yield_tokens_per_s: float) -> None:
        self._rate = yield_tokens_per_s
        self._entries: dict[Sequence, Entry] = {}
        self._lines: dict[Call, list[Entry]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._entries)

    def __contains__(self, seq: object) -> bool:
        return seq in self._entries

    def add(self, seq: Sequence) -> None:
        generation = seq.generation
        begun = generation.has_begun
        delay = 0.0 if begun or not self._rate else len(seq.prompt) / self._rate
        entry = self._entries[seq] = (not begun, generation.arrived + delay, next(self._numbers), seq)
        insort(self._lines.setdefault(generation.share, []), entry)

    def remove(self, seq: Sequence) -> None:
        call = seq.generation.share
        line = self._lines[call]
        line.remove(self._entries.pop(seq))
        if not line:
            del self._lines[call]

    def first(self, shares: Shares) -> Sequence:
        """Whose turn it is; one at least waits."""
        *_, entry = min((*shares.held(call), line[0]) for call, line in self._lines.items())
        return entry[-1]
