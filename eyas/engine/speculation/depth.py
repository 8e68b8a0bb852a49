"""How deep the next round drafts: as promises the most tokens per second, and sometimes otherwise, to learn.

A round's promise is what its sequences will accept, by what they accepted, over what such a round takes, by
what such rounds took. A depth that does not run is tried now and then for two rounds, out of a budget that
grows with time: so acceptance that comes back is noticed, and the price is bounded. It knows counts and
seconds; no tokens, no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from eyas.common.config import SpeculationConfig
from eyas.common.types import DraftLimits
from eyas.engine.speculation.acceptance import Acceptance, Floats, Ints
from eyas.engine.speculation.round_times import RoundTimes

DEPTHS = (1, 3, 5, 7, 11, 15, 23)
MARGIN = 0.005  # a depth that promises less than this more is not changed to
BUDGET = 0.003  # of all time, for trying other depths
KEPT_ROUNDS = 4  # for which a choice holds
TRIED_ROUNDS = 2  # for which a depth is tried: the first after a change takes longer than the next
MOST_CREDIT = 20  # rounds: the most that is saved up for trials
LEAST_PRICE = 0.04  # of a round: what trying a depth counts at least, also where it promises as much


def ladder(spec: SpeculationConfig) -> tuple[int, ...]:
    """The depths between which a drafter of `spec` changes: 0 (plain), a few, and the whole.

    Rounds of each have more rows than those before it.
    """
    found = [spec.steps]
    for depth in reversed(DEPTHS):
        if depth < spec.steps and shallower(spec, depth).width < shallower(spec, found[0]).width:
            found.insert(0, depth)
    return (0, *found)


def shallower(spec: SpeculationConfig, steps: int) -> SpeculationConfig:
    """`spec` with so few steps, at least 1; a tree has its share of the nodes, but all that a chain needs."""
    if steps >= spec.steps:
        return spec
    share = (spec.draft_tokens - 1) * steps // spec.steps
    less = replace(spec, steps=steps, synthetic_rates=spec.synthetic_rates[:steps])
    nodes = min(1 + max(steps, share), less.most_draft_tokens, spec.draft_tokens)
    return replace(less, draft_tokens=nodes)


def narrowed(spec: SpeculationConfig, limits: DraftLimits) -> SpeculationConfig:
    """`spec` within a request's own limits."""
    topk, nodes = limits.topk or spec.topk, limits.draft_tokens or spec.draft_tokens
    steps = min(spec.deepest, limits.deepest or spec.deepest)
    less = replace(spec, steps=steps, topk=min(topk, spec.topk), synthetic_rates=spec.synthetic_rates[:steps])
    return replace(less, draft_tokens=min(nodes, spec.draft_tokens, less.most_draft_tokens))


def best(tokens: Floats, seconds: Floats, current: int) -> int:
    """The place of the depth with the most tokens per second; `current` if that has hardly fewer.

    `tokens` and `seconds`, float64 [depths]: what a round of each depth is expected to give and to take.
    """
    rates = tokens / seconds
    found = int(rates.argmax())
    return found if rates[found] > rates[current] * (1.0 + MARGIN) else current


def prices(tokens: Floats, seconds: Floats, current: int) -> Floats:
    """Seconds that are lost by two rounds of each depth between rounds of the depth at place `current`.

    The first round after a change has only the drafts that the round before it made.
    """
    rate, here = tokens[current] / seconds[current], np.arange(len(tokens))
    both = np.minimum(tokens, tokens[current])
    back = np.where(here < current, tokens[current] - tokens, 0.0)
    lost: Floats = TRIED_ROUNDS * seconds + (back - both - (TRIED_ROUNDS - 1) * tokens) / rate
    lost = np.maximum(lost, LEAST_PRICE * seconds[current])
    return lost


@dataclass(frozen=True)
class Batch:
    """n sequences that decode: int64 [n] each. `limits`: no deeper draft counts for one; 0: none does."""

    slots: Ints
    occupancies: Ints
    limits: Ints

    def __len__(self) -> int:
        return len(self.slots)


class AdaptiveDepth:
    """Chooses one of `depths` for round after round, and learns from those that have landed."""

    def __init__(self, spec: SpeculationConfig, slots: int) -> None:
        self.spec = spec
        self.depths = ladder(spec)
        self._steps = list(self.depths)
        self.times = RoundTimes()
        self._acceptance = Acceptance(slots, spec.steps)
        self._place = len(self.depths) - 1  # of the depth that is best so far, in `depths`
        self._now = self._place  # of the depth that runs: the best one, or one that is tried
        self._size = self._left = 0  # the batch of the last choice, and the rounds for which that still holds
        self._ages = [0] * len(self.depths)  # choices since each was chosen
        self._credit = 0.0  # seconds
        self._expected = np.zeros(spec.steps + 1)  # tokens of a round, by steps, at the last choice
        self._rate = 1.0  # and tokens per second at the best depth

    @property
    def current(self) -> int:
        """The depth that was chosen last."""
        return self.depths[self._now]

    def choose(self, batch: Batch) -> int:
        """The depth of the batch's next round."""
        size = len(batch)
        if size and (self._left <= 0 or size != self._size):
            self._size, self._left = size, KEPT_ROUNDS
            self._choose(batch)
        self._left -= 1
        return self.current

    def _choose(self, batch: Batch) -> None:
        self._expected = self._acceptance.tokens(batch.slots, batch.occupancies, batch.limits)
        tokens = self._expected[self._steps]
        seconds = np.array([self.times.seconds(len(batch), depth) for depth in self.depths])
        self._now = self._place = best(tokens, seconds, self._place)
        self._rate = float(tokens[self._now] / seconds[self._now])
        if batch.limits.any():
            self._try(prices(tokens, seconds, self._place))
        self._ages = [age + 1 for age in self._ages]
        self._ages[self._now] = 0

    def _try(self, price: Floats) -> None:
        """Leave the best depth for a moment, if that is paid for: what has long not run and costs little."""
        worth = np.array(self._ages) / price
        worth[self._place] = 0.0
        place = int(worth.argmax())
        if worth[place] and price[place] <= self._credit:
            self._credit -= price[place]
            self._now, self._left = place, TRIED_ROUNDS

    def landed(self, batch: Batch, depth: int, accepted: Ints, offered: Ints) -> None:
        """What became of the drafts of a round of this depth: int64 [n] each.

        A trial that goes better than was expected has cost less: so it is soon repeated.
        """
        if depth > self.depths[self._place]:
            beyond = len(batch) + accepted.sum() - self._expected[offered.max()]
            self._credit += float(beyond) / self._rate
        if offered.any():
            self._acceptance.seen(batch.slots, batch.occupancies, accepted, offered)

    def took(self, batch: int, depth: int, seconds: float) -> None:
        """A round of nothing but `batch` sequences took so long, as did the one before it at this depth."""
        self._credit = min(self._credit + BUDGET * seconds, MOST_CREDIT * seconds)
        self.times.learn(batch, depth, seconds)
