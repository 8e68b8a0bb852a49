"""Adaptive depth on made-up rounds: nearly as fast as the best fixed depth, whatever batch and acceptance."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from eyas.common.config import SpeculationConfig
from eyas.common.types import DraftLimits
from eyas.engine.speculation import depth as depth_module
from eyas.engine.speculation.acceptance import Acceptance
from eyas.engine.speculation.depth import AdaptiveDepth, Batch, best, ladder, narrowed, prices, shallower
from eyas.engine.speculation.round_times import RoundTimes

SPEC = SpeculationConfig(steps=7, topk=1, draft_tokens=8)
BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 128, 256)
RATES = (0.0, 0.5, 0.75, 0.95)
KEPT_ROWS = 16  # plain rounds after which the draft head catches up

# Milliseconds of an 8B model on one H200, as docs/experiments.md has them: products by rows, the rest of a
# step (attention over 700 tokens, sampling) by sequences, and drafting as rounds of 3 exceed plain ones.
PRODUCTS = ((1, 3.53), (8, 3.53), (32, 3.67), (48, 3.97), (128, 4.47), (320, 6.6), (384, 7.43), (512, 9.29))


def round_ms(batch: int, steps: int) -> float:
    """A round of chains; beyond the measured rows at 750 TFLOP/s."""
    rows = batch * (1 + steps)
    known, times = zip(*PRODUCTS, strict=True)
    products = float(np.interp(rows, known, times)) + max(rows - 512, 0) * 0.0187
    drafting = 0.25 + steps * (0.19 + 0.0012 * batch) + 0.0003 * rows if steps else 0.0
    return products + 0.5 + 0.0235 * batch + drafting


def catch_up_ms(batch: int, rows: int) -> float:
    """The draft head over rows that plain rounds left to it: its weights, or its arithmetic."""
    return max(0.2, 0.0008 * batch * rows)


@dataclass
class World:
    """`batch` sequences whose drafts are accepted at `rate` per depth; rounds take what the model says."""

    batch: int
    rate: float
    seed: int = 1
    times: Callable[[int, int], float] = round_ms
    tokens: float = 0.0
    ms: float = 0.0
    chosen: list[int] = field(default_factory=list)
    _behind: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.riders = Batch(
            np.arange(self.batch), np.arange(self.batch), np.full(self.batch, SPEC.steps, np.int64)
        )

    def run(self, policy: AdaptiveDepth, rounds: int) -> World:
        """As the device runs: what a round verifies was drafted by the one before it, or by catching up."""
        for _ in range(rounds):
            before = self.chosen[-1] if self.chosen else 0
            depth = policy.choose(self.riders)
            self.chosen.append(depth)
            ms = self.times(self.batch, depth) * self.random.normal(1.0, 0.01)
            drafted = min(before, depth)
            if self._behind and (depth or self._behind == KEPT_ROWS):
                ms += catch_up_ms(self.batch, self._behind)
                if depth:  # and drafts at once
                    ms += self.times(self.batch, depth) - self.times(self.batch, 1)
                    drafted = depth
                self._behind = 0
            self._behind += depth == 0
            accepted = self._accepted(drafted)
            policy.landed(self.riders, depth, accepted, np.full(self.batch, drafted))
            if depth == before:
                policy.took(self.batch, depth, 1e-3 * ms)
            self.tokens += self.batch * sum(self.rate**i for i in range(drafted + 1))  # luck apart
            self.ms += ms
        return self

    def _accepted(self, drafted: int) -> np.ndarray:
        kept = self.random.random((self.batch, SPEC.steps)) < self.rate
        kept[:, drafted:] = False
        return kept.cumprod(1).sum(1)

    @property
    def speed(self) -> float:
        return self.tokens / self.ms

    @property
    def best_speed(self) -> float:
        """Of the best fixed depth, plain or not."""
        expected = [self.batch * sum(self.rate**i for i in range(depth + 1)) for depth in range(8)]
        return max(expected[d] / self.times(self.batch, d) for d in (0, 1, 3, 5, 7))


def measured() -> AdaptiveDepth:
    """As after a start that measures a few batches at every depth."""
    policy = AdaptiveDepth(SPEC, max(BATCHES))
    for batch, depth in itertools.product((1, 8, 32, 128, 256), policy.depths):
        policy.times.measured(batch, depth, 1e-3 * round_ms(batch, depth))
    return policy


def worst(policy: Callable[[], AdaptiveDepth], batches: tuple[int, ...], rate: float) -> float:
    """The smallest of the speeds in these batches, each relative to the best fixed depth's."""
    worlds = [World(batch, rate).run(policy(), 1500) for batch in batches]
    return min(world.speed / world.best_speed for world in worlds)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(
    "batches",
    [pytest.param((1, 256), id="some"), pytest.param(BATCHES, id="all", marks=pytest.mark.slow)],
)
def test_nearly_as_fast_as_the_best_fixed_depth(batches: tuple[int, ...], rate: float) -> None:
    """With all that learning costs: plain, 1, 3, 5 and 7 steps are what it is compared to."""
    assert worst(measured, batches, rate) >= 0.98


def test_times_are_learnt_while_it_runs() -> None:
    """Nothing was measured before, and in large batches deep rounds take twice what is guessed."""
    for rate, batch in itertools.product(RATES, (1, 64)):
        assert worst(lambda: AdaptiveDepth(SPEC, 64), (batch,), rate) >= 0.97


@pytest.mark.parametrize("batch", [1, 32])
def test_acceptance_that_goes_and_returns(batch: int) -> None:
    """Each change costs a bounded time: what was lost beyond a steady regime's share is less than 0.8 s."""
    policy, world = measured(), World(batch, 0.75)
    for rate in (0.75, 0.0, 0.75, 0.95, 0.0):
        world.rate, world.tokens, world.ms = rate, 0.0, 0.0
        world.run(policy, 1500)
        lost = world.ms - world.tokens / (0.98 * world.best_speed)
        assert lost < 800, (rate, lost)
        assert world.speed >= 0.9 * world.best_speed


def test_what_never_tries_never_learns_that_acceptance_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth_module, "BUDGET", 0.0)
    policy, world = measured(), World(8, 0.0)
    world.run(policy, 300)
    world.rate, world.tokens, world.ms = 0.95, 0.0, 0.0
    assert world.run(policy, 1500).speed < 0.5 * world.best_speed


def test_wrong_rules_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that looks at tokens alone, and one that pays any price to learn."""
    with monkeypatch.context() as patch:
        patch.setattr(depth_module, "best", lambda tokens, seconds, current: int(tokens.argmax()))
        assert worst(measured, (64,), 0.5) < 0.9
    monkeypatch.setattr(depth_module, "prices", lambda tokens, seconds, current: np.full(len(tokens), 1e-12))
    assert worst(measured, (64,), 0.0) < 0.9


def test_the_best_depth_gives_the_most_tokens_per_second() -> None:
    tokens, seconds = np.array([1.0, 1.5, 1.8]), np.array([1.0, 1.2, 1.6])
    assert best(tokens, seconds, 0) == 1
    assert best(tokens, np.array([1.0, 1.497, 2.0]), 0) == 0, "hardly better is not changed to"
    assert (
        best(tokens, np.array([1.0, 1.497, 2.0]), 1) == 1
        and best(tokens, np.array([1.0, 1.497, 2.0]), 2) == 1
    )


def test_prices_are_what_two_rounds_lose() -> None:
    """Deeper: the first has only the drafts of the round before. Shallower: so has the first one back."""
    tokens, seconds = np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.5, 2.5])
    rate = 2.0 / 1.5
    assert prices(tokens, seconds, 1) == pytest.approx(
        [2 * 1.0 - (2 * 1.0 - 1.0) / rate, 0.04 * 1.5, 2 * 2.5 - (2.0 + 3.0) / rate]
    )


def test_ladders() -> None:
    assert ladder(SPEC) == (0, 1, 3, 5, 7)
    assert ladder(SpeculationConfig(1, 1, 2)) == (0, 1) and ladder(SpeculationConfig(4, 1, 5)) == (0, 1, 3, 4)
    assert shallower(SPEC, 3) == SpeculationConfig(3, 1, 4) and shallower(SPEC, 7) == SPEC
    tree = SpeculationConfig(5, 8, 31)
    assert [shallower(tree, steps).draft_tokens for steps in (1, 3, 5)] == [7, 19, 31]
    thin = SpeculationConfig(8, 2, 9)
    assert [shallower(thin, steps).draft_tokens for steps in (1, 3, 7)] == [2, 4, 8]
    for steps, topk, nodes in itertools.product((2, 5, 9), (2, 3), (2, 10, 25)):
        most = SpeculationConfig(steps, topk).most_draft_tokens
        spec = SpeculationConfig(steps, topk, min(nodes, most))
        found = [shallower(spec, depth) for depth in ladder(spec)[1:]]
        assert all(2 <= one.draft_tokens <= one.most_draft_tokens for one in found)
        assert [one.draft_tokens for one in found] == sorted(one.draft_tokens for one in found)


def test_a_requests_limits_narrow_what_is_drafted() -> None:
    tree = SpeculationConfig(5, 8, 31)
    assert narrowed(tree, DraftLimits()) == tree
    assert narrowed(tree, DraftLimits(topk=1)) == SpeculationConfig(5, 1, 6)
    assert narrowed(SpeculationConfig(5, 8, 4), DraftLimits(topk=1)) == SpeculationConfig(3, 1, 4)
    assert narrowed(tree, DraftLimits(steps=1)) == SpeculationConfig(1, 8, 9)
    assert narrowed(tree, DraftLimits(draft_tokens=3)) == SpeculationConfig(2, 8, 3)
    assert narrowed(SPEC, DraftLimits(draft_tokens=4)) == SpeculationConfig(3, 1, 4)
    assert narrowed(shallower(SPEC, 1), DraftLimits(steps=5)) == shallower(SPEC, 1)
    deepest = [limits.deepest for limits in (DraftLimits(), DraftLimits(4), DraftLimits(4, 0, 3))]
    assert deepest == [0, 4, 2]


# --- acceptance ------------------------------------------------------------------------------------------


def rates(acceptance: Acceptance, slot: int, occupancy: int = 0, most: int = 3) -> list[float]:
    """Of one sequence, by depth."""
    tokens = acceptance.tokens(np.array([slot]), np.array([occupancy]), np.array([most]))
    gains = np.diff(tokens)
    return [float(gains[0]), *(gains[1:] / np.maximum(gains[:-1], 1e-9)).tolist()]


def test_rates_are_conditional_and_each_sequence_has_its_own() -> None:
    acceptance = Acceptance(4, 3)
    slots, seats = np.array([0, 2]), np.array([0, 0])
    for _ in range(300):
        acceptance.seen(slots, seats, np.array([1, 3]), np.array([3, 3]))
    first, second = rates(acceptance, 0), rates(acceptance, 2)
    assert first[0] > 0.9 and first[1] < 0.1, "the second draft is refused"
    assert all(rate > 0.9 for rate in second)
    assert first[2] == pytest.approx(second[2], abs=0.2) or first[2] > 0.5, "the third one was never seen"
    assert rates(acceptance, 1)[1] == pytest.approx(0.5, abs=0.1), "unknown: as all others"
    assert rates(acceptance, 2, occupancy=1)[1] == pytest.approx(0.5, abs=0.1), "a newcomer in a known slot"


def test_limits_end_a_sequences_drafts() -> None:
    acceptance = Acceptance(2, 3)
    tokens = acceptance.tokens(np.array([0, 1]), np.array([0, 0]), np.array([0, 2]))
    assert tokens[0] == 2.0 and tokens[1] == pytest.approx(2.7) and tokens[2] == tokens[3]


def test_unseen_depths_are_believed_as_the_one_above() -> None:
    acceptance = Acceptance(1, 3)
    one = np.array([0])
    for _ in range(500):
        acceptance.seen(one, one, np.array([0]), np.array([1]))
    assert rates(acceptance, 0)[0] < 0.05
    for _ in range(2000):
        acceptance.seen(one, one, np.array([1]), np.array([1]))
    assert rates(acceptance, 0)[1:] == pytest.approx([0.95, 0.95], abs=0.05)


# --- times -----------------------------------------------------------------------------------------------


def test_times_between_those_that_are_known() -> None:
    times = RoundTimes()
    for batch, steps in itertools.product((1, 16), (0, 3)):
        times.measured(batch, steps, 0.004 * batch**0.5 * (1 + steps * batch / 16))
    assert times.seconds(16, 3) == pytest.approx(0.004 * 4 * 4)
    assert times.seconds(4, 0) == pytest.approx(0.008), "on a straight line of logarithms"
    times.learn(4, 0, 0.02)
    low, high = 1 + 3 / 16, 4.0
    assert times.seconds(4, 3) == pytest.approx(0.02 * (low * high) ** 0.5), "compared as elsewhere"


def test_what_all_depths_have_in_common_is_learnt_of_one() -> None:
    times = RoundTimes()
    times.measured(1, 0, 0.004)
    times.measured(1, 5, 0.006)
    for _ in range(100):
        times.learn(1, 0, 0.008)
    assert times.seconds(1, 0) == pytest.approx(0.008, rel=0.01)
    assert 0.0075 < times.seconds(1, 5) < 0.011, "contexts grew: so does a deep round"
    times.learn(1, 5, 9.0)
    assert times.seconds(1, 5) < 0.013, "an interrupted round says little"


def test_before_anything_is_known_drafting_costs_something() -> None:
    times = RoundTimes()
    guesses = [times.seconds(8, steps) for steps in (0, 1, 5)]
    assert guesses[0] < guesses[1] < guesses[2] < 2 * guesses[0]
