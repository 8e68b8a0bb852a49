"""Chooses the depth of the next round: the most tokens per second, and sometimes another, to learn.

A round's promise is what its sequences will accept, by what they accepted, over what such a round takes, by
what such rounds took. The depth beside the best one is tried now and then, out of a budget that is a share of
all time, and pays what the trial was found to cost: so acceptance that comes back is noticed, and the price
is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from eyas.common.config import SpeculationConfig
from eyas.common.types import RequestDraftLimits
from eyas.engine.speculation.depths.acceptance import AcceptanceRates, Floats, Ints
from eyas.engine.speculation.depths.round_times import RoundTimes

DEPTHS = (1, 3, 5, 7, 11, 15, 23)
MARGIN = 0.005  # a depth that promises less than this more is not changed to
BUDGET = 0.004  # of all time, for trying other depths
STABLE_ROUNDS = 4  # for which a choice holds ..
TRIED_ROUNDS = 2  # .. and a trial
MOST_CREDIT = 2  # rounds: the most that is saved up for trials, and the most that one may leave owed
MOST_LATE = 1.3  # of what a round should take: what is beyond that is not its depth's to pay
LEAST_PRICE = 0.04  # of a round: what trying a depth counts at least, also where it promises as much


def ladder(spec: SpeculationConfig) -> tuple[int, ...]:
    """The depths between which a drafter of `spec` changes: 0 (plain), a few, and the whole.

    Rounds of each have more rows than those before it.
    """
    depths = [spec.steps]
    for depth in reversed(DEPTHS):
        if depth < spec.steps and shallower(spec, depth).width < shallower(spec, depths[0]).width:
            depths.insert(0, depth)
    return (0, *depths)


def shallower(spec: SpeculationConfig, steps: int) -> SpeculationConfig:
    """`spec` with so few steps, at least 1; a tree has its share of the nodes, but all that a chain needs."""
    if steps >= spec.steps:
        return spec
    share = (spec.draft_tokens - 1) * steps // spec.steps
    less = replace(spec, steps=steps, synthetic_rates=spec.synthetic_rates[:steps])
    nodes = min(1 + max(steps, share), less.most_draft_tokens, spec.draft_tokens)
    return replace(less, draft_tokens=nodes)


def narrowed(spec: SpeculationConfig, limits: RequestDraftLimits) -> SpeculationConfig:
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
    fastest = int(rates.argmax())
    return fastest if rates[fastest] > rates[current] * (1.0 + MARGIN) else current


def price(tokens: Floats, seconds: Floats, current: int, tried: int) -> float:
    """Seconds that are lost by a trial of the depth at place `tried` between rounds of that at `current`.

    After a plain round drafts are made before the next one; so its price is of one round, and what the second
    one loses is owed. The first round after another change has only the drafts that the round before it made,
    and one back from a shallower depth likewise.
    """
    rate = tokens[current] / seconds[current]
    if not current:
        lost = seconds[tried] - tokens[tried] / rate
    elif tried > current:
        lost = 2 * seconds[tried] - (tokens[current] + tokens[tried]) / rate
    else:
        lost = 2 * seconds[tried] + (tokens[current] - 3 * tokens[tried]) / rate
    return float(max(lost, LEAST_PRICE * seconds[current]))


@dataclass(frozen=True)
class DecodingBatch:
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
        self._acceptance = AcceptanceRates(slots, spec.steps)
        self._place = len(self.depths) - 1  # of the depth that is best so far, in `depths`
        self._now = self._place  # of the depth that runs: the best one, or one that is tried
        self._size = self._left = 0  # the batch of the last choice, and the rounds for which that still holds
        self._beside = self.depths[-1]  # the depth of rounds beside prompts
        self._ages = [0] * len(self.depths)  # choices since each was chosen
        self._tried: int | None = None  # the depth of the last trial, since the best one is what it is
        self._credit = 0.0  # seconds
        self._rate = 1.0  # tokens per second at the best depth, at the last choice

    @property
    def current(self) -> int:
        """The depth that was chosen last."""
        return self.depths[self._now]

    @property
    def beside_prompts(self) -> int:
        """The depth of rounds beside prompts, which are plain or as deep as may be: what loses less."""
        return self._beside

    def keep(self, size: int) -> bool:
        """May the next round, of `size` sequences, be as deep as was chosen last? It then is."""
        stays = not size or (self._left > 0 and size == self._size)
        self._left -= stays
        return stays

    def choose(self, batch: DecodingBatch) -> int:
        """The depth of the batch's next round."""
        if not self.keep(len(batch)):
            self._size, self._left = len(batch), STABLE_ROUNDS
            self._choose(batch)
            self._left -= 1
        return self.current

    def _choose(self, batch: DecodingBatch) -> None:
        tokens = self._acceptance.tokens(batch.slots, batch.occupancies, batch.limits)[self._steps]
        seconds = np.array([self.times.seconds(len(batch), depth) for depth in self.depths])
        place = best(tokens, seconds, self._place)
        if place != self._place:
            self._place, self._tried = place, None
        self._now = self._place
        self._rate = float(tokens[self._now] / seconds[self._now])
        lost = seconds - tokens / self._rate
        self._beside = self.depths[-1] if lost[-1] < lost[0] else 0
        if batch.limits.any():
            self._try(tokens, seconds)
        self._ages = [age + 1 for age in self._ages]
        self._ages[self._now] = 0

    def _try(self, tokens: Floats, seconds: Floats) -> None:
        """Leave the best depth for two rounds, if that is paid for: to one beside it, whatever it promises.

        What it promises may be wrong: plain rounds say nothing of drafts, and what holds rounds up may have
        been the last that was seen of a depth. The first round tells what is accepted, the second one how
        long such rounds take.
        """
        beside = {
            place: price(tokens, seconds, self._place, place)
            for place in (self._place - 1, self._place + 1)
            if 0 <= place < len(self.depths)
        }
        place = max(beside, key=lambda one: self._ages[one] / beside[one])
        if self._ages[place] and beside[place] <= self._credit:
            self._now, self._left = place, TRIED_ROUNDS
            self._tried = self.depths[place]

    def landed(self, batch: DecodingBatch, depth: int, accepted: Ints, offered: Ints) -> None:
        """What became of the drafts of a round of this depth: int64 [n] each."""
        if offered.any():
            self._acceptance.seen(batch.slots, batch.occupancies, accepted, offered)

    def took(self, batch: int, depth: int, seconds: float, gave: int, *, alike: bool) -> None:
        """A round of nothing but `batch` sequences took `seconds`, and gave `gave` tokens.

        `alike`: as deep as the one before it, so that it had the drafts, and the work, of its depth. Trials,
        and what follows them, are paid for as they went: one that went well has cost little, and what held a
        round up for long is not its depth's to pay.
        """
        self._credit = min(self._credit + BUDGET * seconds, MOST_CREDIT * seconds)
        if alike:
            self.times.learn(batch, depth, seconds)
        if self._tried is not None and (not alike or depth == self._tried):
            usual = self.times.seconds(batch, depth)
            debt = min(seconds, MOST_LATE * usual) - gave / self._rate - self._credit
            self._credit = -min(debt, MOST_CREDIT * usual)
