"""Chooses depth and kind of the next round: the most tokens per second, and sometimes another, to learn.

A round's promise is what its sequences will accept, by what they accepted, over what such a round takes
(`round_times.py`). A depth beside the best one is tried now and then, if it could be better by what is not
known of it. Trials are paid for out of a budget that is a share of all time: so acceptance that comes back is
noticed, and the price is bounded.

**Kinds.** Depth 0 is plain. Where drafts are looked up beside a head in the step, a negative depth is that of
rounds in which they are looked up alone: the head waits, which saves its time where texts repeat themselves.

**Acceptance.** A depth's rate is conditional: how often its draft is accepted where all above it were. A
sequence that was seen little counts as all others do, and a depth that was seen little as the depth above it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eyas.common.config import SpeculationConfig
from eyas.common.types import RequestDraftLimits
from eyas.engine.speculation.round_times import Floats, RoundTimes

DEPTHS = (1, 3, 5, 7, 11, 15, 23)
MARGIN = 0.005  # a depth that promises less than this more is not changed to
STAYS = 32  # rounds by which the change has to be paid for
BUDGET = 0.004  # of all time, for trying other depths
STABLE_ROUNDS = 4  # for which a choice holds ..
TRIED_ROUNDS = 2  # .. and a trial
SETTLED = 4  # plain rounds after the first one: until then they take up to a sixth longer on an H200
MOST_CREDIT, MOST_DEBT = 4, 1  # rounds: the most that is saved up, unless a trial is dearer; and that is owed
WORTH = 0.02  # a depth is tried if it may promise at least this share more ..
DOUBT, MOST_DOUBT = 2.0, 0.1  # .. were it faster by these standard deviations, by this share at most
UNSEEN = 50  # choices after which a depth is tried though it seems worse
LEAST_PRICE = 0.04  # of a round: what trying a depth counts at least, also where it promises as much
CHANGE = 0.5  # of a plain round: what leaving plain rounds and coming back takes; 0.45 to 0.53 on an H200
FIRST_RATE = 0.7  # of the first draft, before anything was seen ..
FIRST_LOOKED_UP = 0.2  # .. and of one that was looked up: most texts hardly repeat themselves
WEIGHT = 8.0  # rounds that what is believed beforehand counts as
OWN_ROUNDS, ALL_ROUNDS = 96.0, 1024.0  # what was seen longer ago hardly counts: of one sequence, of all
RECENT_ROUNDS = 48.0  # what was seen since then tells a change
CHANGED = 3.0  # standard deviations between what is recent and all: more is no chance
Ints = NDArray[np.int64]


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
    """The place of the depth with the most tokens per second; `current`, if that has hardly fewer, or if the
    change would not pay for itself soon.

    `tokens` and `seconds`, float64 [depths]: what a round of each depth is expected to give and to take.
    """
    rates = tokens / seconds
    fastest = int(rates.argmax())
    longer = float(max(seconds[current], seconds[fastest]))
    least = MARGIN + change(tokens, seconds, current, fastest) / (STAYS * longer)
    return fastest if rates[fastest] > rates[current] * (1.0 + least) else current


def change(tokens: Floats, seconds: Floats, current: int, other: int) -> float:
    """Seconds that are lost by leaving the depth at place `current` and coming back, whatever the rounds at
    `other` between give.

    A round deeper than the one before it has only as many drafts as that made. After plain rounds the head
    first takes the rows that they left, and drafts; and a first plain round is not prepared while the round
    before it runs.
    """
    if not current or not other:
        return CHANGE * float(seconds[0])
    return float(abs(tokens[current] - tokens[other]) * seconds[current] / tokens[current])


def price(tokens: Floats, seconds: Floats, current: int, tried: int) -> float:
    """Seconds that are lost by a trial of the depth at place `tried` between rounds of that at `current`.

    The first round may have the drafts of the round before it.
    """
    lost = seconds[tried] - tokens[tried] * seconds[current] / tokens[current]
    whole = trial_rounds(tried) * lost + change(tokens, seconds, current, tried)
    return float(max(whole, LEAST_PRICE * seconds[current]))


def trial_rounds(place: int) -> int:
    """Rounds of a trial of the depth at `place`: they tell what is accepted, and how long they take."""
    return TRIED_ROUNDS if place else SETTLED + 1


@dataclass(frozen=True)
class DecodingBatch:
    """n sequences that decode: int64 [n] each. `limits`: no deeper draft counts for one; 0: none does.
    `keys`: tokens of all their contexts together.
    """

    slots: Ints
    occupancies: Ints
    limits: Ints
    keys: int = 0

    def __len__(self) -> int:
        return len(self.slots)


class AdaptiveDepth:
    """Chooses one of `depths` for round after round, and learns from those that have landed. `looks_up`: a
    head may wait.
    """

    def __init__(self, spec: SpeculationConfig, slots: int, *, looks_up: bool = False) -> None:
        self.spec = spec
        self.depths = (*ladder(spec), -spec.deepest) if looks_up else ladder(spec)
        self.times = RoundTimes(self.depths)
        self._headed = list(ladder(spec))
        self._acceptance = AcceptanceRates(slots, spec.steps)
        self._looked_up = AcceptanceRates(slots, spec.steps, FIRST_LOOKED_UP) if looks_up else None
        self._place = len(self._headed) - 1  # of the depth that is best so far, in `depths`
        self._now = self._place  # of the depth that runs: the best one, or one that is tried
        self._size = self._left = 0  # the batch of the last choice, and the rounds for which that still holds
        self._keys = 0  # that the batch reads, by now
        self._beside = spec.steps  # the depth of rounds beside prompts
        self._ages = [0] * len(self.depths)  # choices since each was chosen
        self._alike = 0  # rounds in a row, after the first one
        self._credit = 0.0  # seconds, saved up for trials
        self._dearest = 0.0  # seconds: the highest price of a trial, as of the last choice
        self._trial: Trial | None = None  # that has not wholly landed

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
            self._size, self._keys, self._left = len(batch), batch.keys, STABLE_ROUNDS
            self._choose(batch)
            self._left -= 1
        return self.current

    def _choose(self, batch: DecodingBatch) -> None:
        chains = self._acceptance.tokens(batch.slots, batch.occupancies, batch.limits)
        tokens = chains[self._headed]
        if self._looked_up is not None:
            alone = self._looked_up.tokens(batch.slots, batch.occupancies, batch.limits)
            tokens = np.append(tokens, alone[self.spec.deepest])
        seconds, tried = self.times.seconds(len(batch), batch.keys), self._now != self._place
        self._now = self._place = best(tokens, seconds, self._place)
        if self._trial is not None and self._trial.depth == self.current:
            self._trial = None
        lost = seconds - tokens * seconds[self._now] / tokens[self._now]
        self._beside = self.spec.steps if lost[len(self._headed) - 1] < lost[0] else 0
        if batch.limits.any() and not tried:  # until the next choice nobody knows what that one costs
            doubt = np.minimum(DOUBT * self.times.doubt(len(batch), self._place), MOST_DOUBT * seconds)
            hopes = self._most(tokens, chains, len(batch)) / (seconds - doubt)
            self._try(tokens, seconds, hopes * seconds[self._now] / tokens[self._now] - 1.0)
        self._ages = [age + 1 for age in self._ages]
        self._ages[self._now] = 0

    def _most(self, tokens: Floats, chains: Floats, size: int) -> Floats:
        """The tokens of a round of each depth, float64 [depths], were all drafts accepted of which rounds of
        the best one say nothing: those below its own, and those of the other kind.
        """
        depths, best_depth = np.array(self.depths), self.depths[self._place]
        every = size * (1.0 + np.abs(depths))
        if best_depth < 0:
            return np.where(depths > 0, every, tokens)
        reach = chains[best_depth] - chains[best_depth - 1] if best_depth else size
        below = tokens[self._place] + (depths - best_depth) * reach
        return np.where(depths < 0, every, np.where(depths > best_depth, below, tokens))

    def _try(self, tokens: Floats, seconds: Floats, gains: Floats) -> None:
        """Leave the best depth for a trial, if that is paid for: of one beside it that may be better, or that
        was not seen for long. `gains`, float64 [depths]: the share by which each may be better.
        """
        prices = {at: price(tokens, seconds, self._place, at) for at in self._others}
        self._dearest = max(prices.values())
        beside = {
            at: whole / max(gains[at], WORTH)
            for at, whole in prices.items()
            if gains[at] > WORTH or self._ages[at] > UNSEEN
        }
        place = max(beside, key=lambda one: self._ages[one] / beside[one], default=self._place)
        if place in prices and self._ages[place] and prices[place] <= self._credit:
            self._now, self._left = place, trial_rounds(place)
            rate = float(tokens[self._place] / seconds[self._place])
            self._trial = Trial(self.depths[place], rate)

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

        `alike`: as deep as the one before it, so that it had the drafts, and the work, of its depth.
        """
        self._keys += gave
        saved = self._credit + BUDGET * seconds
        most = max(MOST_CREDIT * seconds, self._dearest)
        self._credit = min(max(saved, -MOST_DEBT * seconds), most)
        self._alike = self._alike + 1 if alike else 0
        if self._alike >= (1 if depth else SETTLED):
            self.times.learn(batch, depth, seconds, self._keys)
        if self._trial is not None:
            self._credit -= self._trial.lost(depth, seconds, gave)
            if self._trial.over:
                self._trial = None


class Trial:
    """Rounds of a depth that is not the best one, and the first round after them. `rate`: tokens per second
    without them. One that goes well costs little.
    """

    def __init__(self, depth: int, rate: float) -> None:
        self.depth, self._rate = depth, rate
        self._began = self.over = False

    def lost(self, depth: int, seconds: float, gave: int) -> float:
        """Seconds that a round lost to the trial; those before it were in flight as it was chosen."""
        self.over = self._began and depth != self.depth
        self._began = self._began or depth == self.depth
        return seconds - gave / self._rate if self._began else 0.0


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
