"""Chooses depth and kind of the next round: the most tokens per second, and sometimes another, to learn.

A round's promise is what its sequences will accept, by what they accepted, over what such a round takes, by
what such rounds took. The depth beside the best one is tried now and then, out of a budget that is a share of
all time, and pays what the trial was found to cost: so acceptance that comes back is noticed, and the price
is bounded.

**Kinds.** Depth 0 is plain. Where drafts are looked up beside a head in the step, a negative depth is that of
rounds in which they are looked up alone: the head waits, which saves its time where texts repeat themselves.

**Acceptance.** A depth's rate is conditional: how often its draft is accepted where all above it were. A
sequence that was seen little counts as all others do, and a depth that was seen little as the depth above it.

**Times of rounds**, by batch and depth: measured at a start, learnt from rounds, or estimated. What counts is
how depths compare in one batch. What all of them have in common there (attention over contexts that grow, the
host) comes on top of a round whatever its depth: so it is learnt in seconds, from whichever runs. A batch
that was never seen compares depths as those beside it do. Whatever holds a round up (newcomers, the host)
makes it longer, never shorter: so the shortest of a few is believed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eyas.common.config import SpeculationConfig
from eyas.common.types import RequestDraftLimits

DEPTHS = (1, 3, 5, 7, 11, 15, 23)
MARGIN = 0.005  # a depth that promises less than this more is not changed to
BUDGET = 0.004  # of all time, for trying other depths
STABLE_ROUNDS = 4  # for which a choice holds ..
TRIED_ROUNDS = 2  # .. and a trial
MOST_CREDIT = 2  # rounds: the most that is saved up for trials, and the most that one may leave owed
MOST_LATE = 1.3  # of what a round should take: what is beyond that is not its depth's to pay
LEAST_PRICE = 0.04  # of a round: what trying a depth counts at least, also where it promises as much
FIRST_RATE = 0.7  # of the first draft, before anything was seen ..
FIRST_LOOKED_UP = 0.2  # .. and of one that was looked up: most texts hardly repeat themselves
WEIGHT = 8.0  # rounds that what is believed beforehand counts as
OWN_ROUNDS, ALL_ROUNDS = 96.0, 1024.0  # what was seen longer ago hardly counts: of one sequence, of all
RECENT_ROUNDS = 48.0  # what was seen since then tells a change
CHANGED = 3.0  # standard deviations between what is recent and all: more is no chance
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
COMMON = 0.05  # of a surprise: what all depths of the batch learn from it
DEPTH_ROUNDS = 32.0  # what a depth's rounds said longer ago, in rounds of its batch, hardly counts
PER_STEP = 0.1  # of a plain round: what each step of drafting adds, until it is known
SURPRISE = 0.3  # of what was expected: the largest that counts, for an interrupted round says little
BEFOREHAND = 2.0  # rounds that what is believed beforehand counts as: what was measured as twice as many
LAST = 3  # rounds of a batch and depth of which the shortest is believed


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
    """Chooses one of `depths` for round after round, and learns from those that have landed. `looks_up`: a
    head may wait.
    """

    def __init__(self, spec: SpeculationConfig, slots: int, *, looks_up: bool = False) -> None:
        self.spec = spec
        self.depths = (*ladder(spec), -spec.deepest) if looks_up else ladder(spec)
        self.times = RoundTimes()
        self._headed = list(ladder(spec))
        self._acceptance = AcceptanceRates(slots, spec.steps)
        self._looked_up = AcceptanceRates(slots, spec.steps, FIRST_LOOKED_UP) if looks_up else None
        self._place = len(self._headed) - 1  # of the depth that is best so far, in `depths`
        self._now = self._place  # of the depth that runs: the best one, or one that is tried
        self._size = self._left = 0  # the batch of the last choice, and the rounds for which that still holds
        self._beside = spec.steps  # the depth of rounds beside prompts
        self._ages = [0] * len(self.depths)  # choices since each was chosen
        self._tried = False  # was another depth tried since the best one is what it is?
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
        tokens = self._acceptance.tokens(batch.slots, batch.occupancies, batch.limits)[self._headed]
        if self._looked_up is not None:
            alone = self._looked_up.tokens(batch.slots, batch.occupancies, batch.limits)
            tokens = np.append(tokens, alone[self.spec.deepest])
        seconds = np.array([self.times.seconds(len(batch), depth) for depth in self.depths])
        place = best(tokens, seconds, self._place)
        if place != self._place:
            self._place, self._tried = place, False
        self._now = self._place
        self._rate = float(tokens[self._now] / seconds[self._now])
        lost = seconds - tokens / self._rate
        self._beside = self.spec.steps if lost[len(self._headed) - 1] < lost[0] else 0
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
        beside = {place: price(tokens, seconds, self._place, place) for place in self._others}
        place = max(beside, key=lambda one: self._ages[one] / beside[one])
        if self._ages[place] and beside[place] <= self._credit:
            self._now, self._left = place, TRIED_ROUNDS
            self._tried = True

    @property
    def _others(self) -> list[int]:
        """Places of the depths beside the best one, and of the other kind."""
        deepest = len(self._headed) - 1
        if self._place > deepest:
            return [0, deepest]
        others = [place for place in (self._place - 1, self._place + 1) if 0 <= place <= deepest]
        return others if self._looked_up is None else [*others, deepest + 1]

    def landed(self, batch: DecodingBatch, depth: int, accepted: Ints, offered: Ints) -> None:
        """What became of drafts that a round of this depth made: int64 [n] each."""
        rates = self._acceptance if depth >= 0 or self._looked_up is None else self._looked_up
        if offered.any():
            rates.seen(batch.slots, batch.occupancies, accepted, offered)

    def took(self, batch: int, depth: int, seconds: float, gave: int, *, alike: bool) -> None:
        """A round of nothing but `batch` sequences took `seconds`, and gave `gave` tokens.

        `alike`: as deep as the one before it, so that it had the drafts, and the work, of its depth. Trials,
        and what follows them, are paid for as they went: one that went well has cost little, and what held a
        round up for long is not its depth's to pay.
        """
        self._credit = min(self._credit + BUDGET * seconds, MOST_CREDIT * seconds)
        if alike:
            self.times.learn(batch, depth, seconds)
        if self._tried and (not alike or depth != self.depths[self._place]):
            usual = self.times.seconds(batch, depth)
            debt = min(seconds, MOST_LATE * usual) - gave / self._rate - self._credit
            self._credit = -min(debt, MOST_CREDIT * usual)


class AcceptanceRates:
    """Of at most `slots` sequences at a time, down to depth `most`. `first`: of a first draft, before."""

    def __init__(self, slots: int, most: int, first: float = FIRST_RATE) -> None:
        self._first = first
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
        rates, above = [], self._first
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
        self._rounds[bucket] = {one: count * (1.0 - 1.0 / DEPTH_ROUNDS) for one, count in rounds.items()}
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
    """In plain rounds; of one in which a head waits, as much as a plain one."""
    return 1.0 + PER_STEP * max(steps, 0)
