"""The order of the queue: fair between callers, then between the calls of one caller, then by arrival, which
priorities move (`eyas.common.params`).

The share of a call is a number of sequences: those that run, those whose pages are here or coming, and those
for which slots are reserved.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Iterable, Iterator

from eyas.engine.batch.sequence import Generation, Sequence
from eyas.engine.scheduling.limits import PromptYield

Call = tuple[str, str]  # caller, call
Turn = tuple[int, int, bool, float]  # smaller: earlier
Entry = tuple[bool, float, int, Sequence]  # smaller: earlier in its call; the int is unique


class CallShares:
    """The number of sequences per caller and per call."""

    def __init__(self) -> None:
        self._calls: dict[Call, int] = {}
        self._callers: dict[str, int] = {}

    def plus(self, others: Iterable[Generation]) -> CallShares:
        """A copy of these counts with one more sequence for each of `others`."""
        shares = CallShares()
        shares._calls, shares._callers = dict(self._calls), dict(self._callers)
        for generation in others:
            shares.add(generation)
        return shares

    @classmethod
    def together(cls, several: Iterable[CallShares]) -> CallShares:
        """The counts of several added up."""
        total = cls()
        for one in several:
            for call, count in one._calls.items():
                total._calls[call] = total._calls.get(call, 0) + count
                total._callers[call[0]] = total._callers.get(call[0], 0) + count
        return total

    def add(self, generation: Generation, count: int = 1) -> None:
        """Adds `count` sequences (negative: removes them) to the generation's call and caller."""
        call = generation.share
        calls = self._calls[call] = self._calls.get(call, 0) + count
        callers = self._callers[call[0]] = self._callers.get(call[0], 0) + count
        if not calls:
            del self._calls[call]
        if not callers:
            del self._callers[call[0]]

    def counts(self, call: Call) -> tuple[int, int]:
        """The numbers of sequences of the call's caller and of the call itself."""
        return self._callers.get(call[0], 0), self._calls.get(call, 0)

    def turn(self, generation: Generation) -> Turn:
        """The sort key: the smallest share first, then generations that have begun, then the oldest."""
        return *self.counts(generation.share), not generation.has_started, generation.place

    def owing(self, claimant: Generation, gain: int) -> set[Call]:
        """Calls that, after losing one place, still hold at least as much as the claimant with `gain` more.

        Callers are compared with callers, and calls with calls of the same caller. Each transfer lowers the
        sum of squares of the callers' shares, or keeps that sum and lowers the one of the calls' shares: so
        no place is ever handed back.
        """
        own, (caller_has, call_has) = claimant.share[0], self.counts(claimant.share)
        richer = {caller for caller, count in self._callers.items() if count > caller_has + gain} - {own}
        return {
            (caller, call)
            for (caller, call), count in self._calls.items()
            if caller in richer or (caller == own and count > call_has + gain)
        }


class WaitingQueue:
    """Sequences that wait, in one sorted line per call: finding the next one costs one look per call.

    A prompt that has not begun `yields` to shorter ones of its caller that come soon after it. So what passes
    it came within that time, and the wait of everybody has an end.
    """

    def __init__(self, yields: PromptYield) -> None:
        self._yields = yields
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
        """Puts a sequence into the line of its call."""
        generation = seq.generation
        started = generation.has_started
        place = generation.place if started else self._due(seq)
        entry = self._entries[seq] = (not started, place, next(self._numbers), seq)
        insort(self._lines.setdefault(generation.share, []), entry)

    def yields(self, running: Sequence, seq: Sequence) -> bool:
        """True if a sequence whose prompt is being computed yields to `seq`, which waits."""
        return self._due(seq) < self._due(running)

    def _due(self, seq: Sequence) -> float:
        """The time of its arrival, plus the time for which its prompt yields."""
        return seq.generation.place + self._yields.seconds(len(seq.prompt))

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence that waits out of its line. Raises KeyError if it does not wait."""
        call = seq.generation.share
        line = self._lines[call]
        line.remove(self._entries.pop(seq))
        if not line:
            del self._lines[call]

    def first(self, shares: CallShares) -> Sequence:
        """The sequence whose turn it is. At least one sequence must wait."""
        *_, entry = min((*shares.counts(call), line[0]) for call, line in self._lines.items())
        return entry[-1]
