"""Whether drafting ahead is worth it here and now, found out by doing: the two ways take turns.

What it gains (proposals that are ready) and what it costs (others that wait for a forward, weaker drafts made
of predicted features, cores that a verifier would have had) come together in one figure, seconds per token
of the sequences that are drafted for. So it is measured with and without, and the better way is kept for a
while. Plain numbers; this file knows no drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

TRIAL = 128  # rounds of each way, before one is chosen
KEPT = 2048  # rounds for which the chosen one is kept: a trial costs at most a sixteenth of them
MARGIN = 0.99  # drafting ahead must take less than this share of the time without it
PAUSE_S = 2.0  # a longer round tells of something else: a prompt before it, a sequence that had to wait
MEMORY = 0.5  # what an earlier trial counts beside the newest


@dataclass
class Spent:
    """Time of some rounds, and the tokens that they gave."""

    seconds: float = 0.0
    tokens: float = 0.0
    rounds: int = 0

    def add(self, seconds: float, tokens: int) -> None:
        """One more round."""
        self.seconds += seconds
        self.tokens += tokens
        self.rounds += 1

    def faded(self) -> Spent:
        """What is left of it when the next trial begins."""
        return Spent(self.seconds * MEMORY, self.tokens * MEMORY)


def better(ahead: Spent, plain: Spent) -> bool:
    """Does drafting ahead take less time per token? Not for as long as one of them is unknown."""
    if not ahead.tokens or not plain.tokens:
        return False
    return ahead.seconds / ahead.tokens < MARGIN * plain.seconds / plain.tokens


@dataclass
class Rounds:
    """A sequence's rounds. `began`: when the newest did, in monotonic seconds; 0.0: none has.

    `ways`: with drafting ahead or without, the newest round and the one before it.
    """

    began: float = 0.0
    ways: tuple[bool | None, bool | None] = (None, None)


class Turns:
    """`ahead`: the way of the moment. A trial of it, one without, then the better one until the next trial.

    It begins without: a worker that is asked little does nothing that has not proved its worth.
    """

    def __init__(self) -> None:
        self.ahead = False
        self._trying: bool | None = False  # which way is on trial; None: a choice has been made
        self._spent = {True: Spent(), False: Spent()}
        self._left = TRIAL

    def round(self, rounds: Rounds, tokens: int, now: float) -> None:
        """A round of a sequence is over, gave that many tokens, and the next begins.

        It counts for a way if that also was the way of the round before it, in which it was drafted for.
        """
        seconds, way = now - rounds.began, self.ahead
        if seconds <= PAUSE_S and rounds.ways == (way, way):
            self._count(seconds, tokens)
        rounds.began, rounds.ways = now, (self.ahead, rounds.ways[0])

    def _count(self, seconds: float, tokens: int) -> None:
        if self._trying is not None:
            self._spent[self._trying].add(seconds, tokens)
        self._left -= 1
        if self._left <= 0:
            self._turn()

    def _turn(self) -> None:
        if self._trying is None:
            self._spent = {way: spent.faded() for way, spent in self._spent.items()}
            self._begin(not self.ahead)  # the other first: changes of load show in it
        elif self._spent[not self._trying].rounds < TRIAL:
            self._begin(not self._trying)
        else:
            self._trying = None
            self.ahead = better(self._spent[True], self._spent[False])
            self._left = KEPT

    def _begin(self, way: bool) -> None:
        self._trying = self.ahead = way
        self._left = TRIAL
