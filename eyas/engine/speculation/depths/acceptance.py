"""Running estimates of the acceptance of drafts at each depth, for every sequence and for all together.

A depth's rate is conditional: how often its draft is accepted where all above it were. A sequence that was
seen little counts as all others do, and a depth that was seen little as the depth above it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FIRST_RATE = 0.7  # of the first draft, before anything was seen
WEIGHT = 8.0  # rounds that what is believed beforehand counts as
OWN_ROUNDS, ALL_ROUNDS = 96.0, 1024.0  # what was seen longer ago hardly counts: of one sequence, of all
RECENT_ROUNDS = 48.0  # what was seen since then tells a change
CHANGED = 3.0  # standard deviations between what is recent and all: more is no chance

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class AcceptanceRates:
    """Of at most `slots` sequences at a time, down to depth `most`."""

    def __init__(self, slots: int, most: int) -> None:
        self._occupants = np.full(slots, -1, np.int64)
        self._own = np.zeros((2, slots, most))  # accepted; offered, with all above it accepted
        self._all = np.zeros((2, most))
        self._recent = np.zeros((2, most))
        self._down_to = np.tri(most + 1, most, -1)  # row d: 1.0 for the first d depths

    def seen(self, slots: Ints, occupancies: Ints, accepted: Ints, offered: Ints) -> None:
        """A round of n sequences: int64 [n] each; `offered`: the depth of each one's drafts."""
        self._seat(slots, occupancies)
        new = self._down_to[np.stack((accepted, np.minimum(accepted + 1, offered)))]
        self._own[:, slots] = self._own[:, slots] * (1.0 - new[1] / OWN_ROUNDS) + new
        total = new.sum(1)
        self._all = _faded(self._all, total, ALL_ROUNDS)
        self._recent = _faded(self._recent, total, RECENT_ROUNDS)
        self._forget()

    def _forget(self) -> None:
        """Where what is recent cannot be chance, what was before counts no more, and nothing deeper does."""
        (hit, tried), (hits, trials) = self._recent, self._all
        rate = (hits + 1.0) / (trials + 2.0)
        beyond = np.abs(hit - rate * tried) > CHANGED * np.sqrt(rate * (1.0 - rate) * tried)
        if beyond.any():
            first = int(beyond.argmax())
            self._recent[:, first + 1 :] = 0.0
            self._all[:, first:] = self._recent[:, first:]
            self._own[:, :, first:] = 0.0

    def tokens(self, slots: Ints, occupancies: Ints, limits: Ints) -> Floats:
        """Expected tokens of a round of n sequences, by the depth of its drafts: float64 [most + 1].

        `limits` int64 [n]: no deeper draft counts for a sequence; 0: it has none.
        """
        self._seat(slots, occupancies)
        hit, tried = self._own[:, slots]
        rates = (hit + WEIGHT * self._rates()) / (tried + WEIGHT)
        rates *= self._down_to[limits]
        tokens: Floats = np.concatenate(([0.0], rates.cumprod(1).sum(0).cumsum())) + len(slots)
        return tokens

    def _rates(self) -> Floats:
        """Of all sequences together, by depth: float64 [most]."""
        rates, above = [], FIRST_RATE
        for hit, tried in self._all.T.tolist():
            above = (hit + WEIGHT * above) / (tried + WEIGHT)
            rates.append(above)
        return np.array(rates)

    def _seat(self, slots: Ints, occupancies: Ints) -> None:
        """Forgets what was seen of others in these slots."""
        others = slots[self._occupants[slots] != occupancies]
        if len(others):
            self._own[:, others] = 0.0
            self._occupants[slots] = occupancies


def _faded(counts: Floats, new: Floats, rounds: float) -> Floats:
    """`counts` of about `rounds` rounds, with those that are `new`: float64 [2, most] each."""
    faded: Floats = counts * (1.0 - np.minimum(new[1] / rounds, 1.0)) + new
    return faded
