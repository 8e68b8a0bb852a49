"""How long a round takes, by its batch and its depth: learnt from rounds, guessed for what was not seen yet.

What counts is how depths compare in one batch. So what all of them have in common there (the length of
contexts, a busy machine) is learnt from whichever runs, and a depth that was never seen in a batch compares
to the others as it does in the nearest batches. It knows no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
COMMON, OWN = 0.1, 0.1  # of a surprise: what all depths of the batch learn, what the depth learns besides
PER_STEP = 0.1  # of a plain round: what each step of drafting adds, until it is known
SURPRISE = 0.3  # the largest that counts, as a logarithm: an interrupted round says little
FIRST_SURPRISE = 0.7  # of a depth's first round in a batch


class RoundTimes:
    """Logarithms of seconds, by batch and by steps of drafting."""

    def __init__(self) -> None:
        self._known: dict[int, dict[int, float]] = {}

    def measured(self, batch: int, steps: int, seconds: float) -> None:
        """A round of `batch` sequences takes so long, as was found before anything ran."""
        self._known.setdefault(_bucket(batch), {})[steps] = math.log(seconds)

    def learn(self, batch: int, steps: int, seconds: float) -> None:
        """A round of `batch` sequences took so long."""
        bucket, told = _bucket(batch), math.log(max(seconds, 1e-9))
        if bucket not in self._known:
            self._known[bucket] = {steps: told}
            return
        here, expected = self._known[bucket], self._log(bucket, steps)
        if steps not in here:
            here[steps] = expected + min(max(told - expected, -FIRST_SURPRISE), FIRST_SURPRISE)
            return
        surprise = min(max(told - expected, -SURPRISE), SURPRISE)
        for depth in here:
            here[depth] += COMMON * surprise
        here[steps] += OWN * surprise

    def seconds(self, batch: int, steps: int) -> float:
        """What a round takes; before any was seen, in plain rounds."""
        return math.exp(self._log(_bucket(batch), steps))

    def _log(self, bucket: int, steps: int) -> float:
        here = self._known.get(bucket, {})
        if steps in here:
            return here[steps]
        if here:
            beside = min(here, key=lambda depth: (abs(depth - steps), depth))
            return here[beside] + self._beyond(bucket, steps, beside)
        if not self._known:
            return _guess(steps)
        counts = Counter(depth for known in self._known.values() for depth in known)
        beside = max(counts, key=lambda depth: (counts[depth], -depth))
        levels = {at: known[beside] for at, known in self._known.items() if beside in known}
        return _between(bucket, levels) + self._beyond(bucket, steps, beside)

    def _beyond(self, bucket: int, steps: int, beside: int) -> float:
        """By how much a round of `steps` exceeds one of `beside`, by what other batches say."""
        known = self._known.items()
        gaps = {at: logs[steps] - logs[beside] for at, logs in known if steps in logs and beside in logs}
        return _between(bucket, gaps) if gaps else _guess(steps) - _guess(beside)


def _between(bucket: int, points: dict[int, float]) -> float:
    """The value at `bucket` on straight lines over the batch's logarithm; beyond the ends, theirs."""
    low = max((at for at in points if at <= bucket), default=min(points))
    high = min((at for at in points if at >= bucket), default=max(points))
    if low == high:
        return points[low]
    part = math.log(bucket / low) / math.log(high / low)
    return points[low] + part * (points[high] - points[low])


def _bucket(batch: int) -> int:
    return BATCHES[min(bisect_left(BATCHES, batch), len(BATCHES) - 1)]


def _guess(steps: int) -> float:
    return math.log(1.0 + PER_STEP * steps)
