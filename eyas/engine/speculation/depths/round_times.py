"""The time of a round by its batch and its depth: measured at a start, learnt from rounds, or estimated.

What counts is how depths compare in one batch. What all of them have in common there (attention over contexts
that grow, the host) comes on top of a round whatever its depth: so it is learnt in seconds, from whichever
runs. A batch that was never seen compares depths as those beside it do. Whatever holds a round up (newcomers,
the host) makes it longer, never shorter: so the shortest of a few is believed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
COMMON = 0.05  # of a surprise: what all depths of the batch learn from it
OWN_ROUNDS = 32.0  # what a depth's rounds said longer ago, in rounds of its batch, hardly counts
PER_STEP = 0.1  # of a plain round: what each step of drafting adds, until it is known
SURPRISE = 0.3  # of what was expected: the largest that counts, for an interrupted round says little
BEFOREHAND = 2.0  # rounds that what is believed beforehand counts as: what was measured as twice as many
LAST = 3  # rounds of a batch and depth of which the shortest is believed


class RoundTimes:
    """Seconds, by batch and by steps of drafting."""

    def __init__(self) -> None:
        self._known: dict[int, dict[int, float]] = {}
        self._rounds: dict[int, dict[int, float]] = {}  # that were learnt from, by batch and depth; they fade
        self._last: dict[tuple[int, int], deque[float]] = {}

    def measured(self, batch: int, steps: int, seconds: float) -> None:
        """A round of `batch` sequences takes `seconds`, as was found before anything ran."""
        self._known.setdefault(_bucket(batch), {})[steps] = seconds
        self._rounds.setdefault(_bucket(batch), {})[steps] = BEFOREHAND

    def learn(self, batch: int, steps: int, seconds: float) -> None:
        """A round of `batch` sequences took `seconds`.

        A depth's first rounds say most about itself, and so do those after many of others: what holds rounds
        up for a while may have been the last that was seen of it. No time at all, which a coarse clock may
        tell, says nothing.
        """
        if seconds <= 0.0:
            return
        bucket = _bucket(batch)
        here = self._here(bucket)
        expected = here.setdefault(steps, self._seconds(bucket, steps) if here else seconds)
        last = self._last.setdefault((bucket, steps), deque(maxlen=LAST))
        last.append(seconds)
        surprise = min(max(min(last) - expected, -SURPRISE * expected), SURPRISE * expected)
        _shift(here, COMMON * surprise)
        rounds = self._rounds.setdefault(bucket, {})
        here[steps] += surprise / (BEFOREHAND + rounds.get(steps, 0.0))
        self._rounds[bucket] = {one: count * (1.0 - 1.0 / OWN_ROUNDS) for one, count in rounds.items()}
        self._rounds[bucket][steps] = self._rounds[bucket].get(steps, 0.0) + 1.0

    def _here(self, bucket: int) -> dict[int, float]:
        """What is known of a batch: at first what the others say."""
        if bucket not in self._known:
            steps = {one for known in self._known.values() for one in known}
            self._known[bucket] = {one: self._seconds(bucket, one) for one in steps}
        return self._known[bucket]

    def seconds(self, batch: int, steps: int) -> float:
        """What a round takes; before any was seen, in plain rounds."""
        return self._seconds(_bucket(batch), steps)

    def _seconds(self, bucket: int, steps: int) -> float:
        here = self._known.get(bucket, {})
        if steps in here:
            return here[steps]
        if here:
            beside = min(here, key=lambda depth: (abs(depth - steps), depth))
            return here[beside] * _guess(steps) / _guess(beside)
        alike = {at: known[steps] for at, known in self._known.items() if steps in known}
        if alike:
            return _between(bucket, alike)
        counts = Counter(depth for known in self._known.values() for depth in known)
        if not counts:
            return _guess(steps)
        beside = max(counts, key=lambda depth: (counts[depth], -depth))
        return self._seconds(bucket, beside) * _guess(steps) / _guess(beside)


def _shift(here: dict[int, float], seconds: float) -> None:
    """All depths take so much longer; none less than half as long."""
    for depth, known in here.items():
        here[depth] = max(known + seconds, 0.5 * known)


def _between(bucket: int, points: dict[int, float]) -> float:
    """The value at `bucket` on straight lines, of logarithms both; beyond the ends, theirs."""
    low = max((at for at in points if at <= bucket), default=min(points))
    high = min((at for at in points if at >= bucket), default=max(points))
    if low == high:
        return points[low]
    part = math.log(bucket / low) / math.log(high / low)
    return math.exp(math.log(points[low]) * (1.0 - part) + math.log(points[high]) * part)


def _bucket(batch: int) -> int:
    return BATCHES[min(bisect_left(BATCHES, batch), len(BATCHES) - 1)]


def _guess(steps: int) -> float:
    """In plain rounds."""
    return 1.0 + PER_STEP * steps
