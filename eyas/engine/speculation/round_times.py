"""How long rounds take, by batch, depth and the keys that they read: measured, learnt or guessed.

What counts is how depths compare in one batch, and three things change what rounds take. Attention reads the
keys of all contexts, which takes as many seconds at every depth. A card that is hot, or shared, makes all
rounds longer by a share. And a depth may have been measured wrongly, or have changed alone. So all are learnt
from each round, whatever its depth, each by how much of a surprise it may explain: what depths a batch knows,
and the seconds of a key, are normally distributed beliefs, updated as by a Kalman filter. A batch that was
never seen compares depths as those beside it do.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
PER_STEP = 0.1  # of a plain round: what each step of drafting adds, until it is known
KEYS = 100_000.0  # whose reading is believed, at first, to take a plain round of the first batch
COMMON, COMMON_DRIFT = 0.05, 0.004  # standard deviations of what all depths have in common: first, per round
OWN, OWN_DRIFT = 0.03, 0.001  # and of a depth alone ..
GUESSED = 0.2  # .. of a batch beyond those that were measured
NOISE = 0.03  # of a round: its standard deviation
LATE = 2.0  # standard deviations beyond which a round is late ..
LATE_ROUNDS = 3  # .. and believed in part: so are the first ones in a row, those behind them wholly


class RoundTimes:
    """Seconds of rounds. `depths`: for which they are known, plain first."""

    def __init__(self, depths: Sequence[int]) -> None:
        self._places = {depth: place for place, depth in enumerate(depths)}
        self._guess = np.array([1.0 + PER_STEP * max(depth, 0) for depth in depths])
        self._unread: dict[int, Belief] = {}  # by batch: rounds without what keys take
        self._key = Belief(np.zeros(1), np.zeros((1, 1)))
        self._late = 0  # rounds in a row

    def measured(self, batch: int, depth: int, seconds: float) -> None:
        """A round of `batch` sequences takes `seconds`, as was found before anything ran."""
        place = self._places[depth]
        self._here(_bucket(batch), seconds / self._guess[place]).measured(place, seconds)

    def learn(self, batch: int, depth: int, seconds: float, keys: int = 0) -> None:
        """A round of `batch` sequences, whose contexts have `keys` tokens together, took `seconds`.

        Whatever holds a round up makes it longer, never shorter: a round that is late is believed in part,
        until several in a row are. No time at all, which a coarse clock may tell, says nothing.
        """
        if seconds <= 0.0:
            return
        place, read = self._places[depth], np.array([float(keys)])
        here, one = self._here(_bucket(batch), seconds / self._guess[place]), np.eye(len(self._guess))[place]
        here.drift()
        self._key.drift()
        expected = float(here.mean[place] + self._key.mean @ read)
        variance = here.variance(one) + self._key.variance(read) + (NOISE * expected) ** 2
        surprise, most = seconds - expected, LATE * math.sqrt(variance)
        self._late = self._late + 1 if surprise > most else 0
        if 0 < self._late <= LATE_ROUNDS:
            surprise = most
        here.learn(one, surprise, variance)
        self._key.learn(read, surprise, variance)

    def seconds(self, batch: int, keys: int = 0) -> Floats:
        """Seconds of a round of each depth, float64 [depths]; before any was seen, in plain rounds."""
        found: Floats = self._between(_bucket(batch)) + keys * self._key.mean[0]
        return found

    def doubt(self, batch: int, place: int) -> Floats:
        """Standard deviations of what each depth takes, float64 [depths], if that at `place` takes what is
        believed; in seconds.
        """
        here = self._unread.get(_bucket(batch))
        if here is None:
            return GUESSED * self._between(_bucket(batch))
        return here.deviations(place)

    def _here(self, bucket: int, plain: float) -> Belief:
        """The belief about a batch: at first what the others say, or, if there are none, what follows from
        the seconds of a `plain` round.
        """
        if not self._unread:
            key = np.array([plain / KEYS])
            self._key = Belief(key, np.outer(key, key))
            self._unread[bucket] = Belief.of(plain * self._guess, GUESSED)
        elif bucket not in self._unread:
            between = min(self._unread) < bucket < max(self._unread)
            self._unread[bucket] = Belief.of(self._between(bucket), OWN if between else GUESSED)
        return self._unread[bucket]

    def _between(self, bucket: int) -> Floats:
        """Seconds at `bucket` on straight lines, of logarithms both; beyond the ends, theirs."""
        if not self._unread:
            return self._guess
        low = max((at for at in self._unread if at <= bucket), default=min(self._unread))
        high = min((at for at in self._unread if at >= bucket), default=max(self._unread))
        if low == high:
            return self._unread[low].mean
        part = math.log(bucket / low) / math.log(high / low)
        found: Floats = self._unread[low].mean ** (1.0 - part) * self._unread[high].mean ** part
        return found


class Belief:
    """Positive numbers that are believed to be normally distributed: `mean` [n], `covariance` [n, n]."""

    def __init__(self, mean: Floats, covariance: Floats) -> None:
        self.mean, self.covariance = mean, covariance

    @classmethod
    def of(cls, mean: Floats, own: float) -> Belief:
        """All may be wrong by a share that they have in common, and each by the share `own` more."""
        return cls(mean.copy(), COMMON**2 * np.outer(mean, mean) + np.diag((own * mean) ** 2))

    def measured(self, place: int, value: float) -> None:
        """One of them was found to be `value`, before anything was learnt."""
        self.mean[place] = value
        self.covariance[place] = self.covariance[:, place] = COMMON**2 * value * self.mean
        self.covariance[place, place] += (OWN * value) ** 2

    def drift(self) -> None:
        """A round passes, in which all may change by a share in common, and each by less."""
        self.covariance += COMMON_DRIFT**2 * np.outer(self.mean, self.mean)
        self.covariance += np.diag((OWN_DRIFT * self.mean) ** 2)

    def variance(self, weights: Floats) -> float:
        """The variance of their sum with these weights, float64 [n]."""
        return float(weights @ self.covariance @ weights)

    def learn(self, weights: Floats, surprise: float, variance: float) -> None:
        """A sum, of which theirs with these weights is a part, was larger than expected by `surprise`;
        `variance`: of that sum.
        """
        gain = self.covariance @ weights / variance
        self.mean = np.maximum(self.mean + gain * surprise, 0.5 * self.mean)
        self.covariance = self.covariance - np.outer(gain, weights @ self.covariance)

    def deviations(self, place: int) -> Floats:
        """Standard deviations, float64 [n], of what each has not in common with that at `place`."""
        share, own = self.mean / self.mean[place], np.diag(self.covariance)
        apart = own + share**2 * own[place] - 2.0 * share * self.covariance[place]
        found: Floats = np.sqrt(np.maximum(apart, 0.0))
        return found


def _bucket(batch: int) -> int:
    return BATCHES[min(bisect_left(BATCHES, batch), len(BATCHES) - 1)]
