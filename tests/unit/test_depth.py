"""The parts of adaptive depth: the choice, a trial's price, what is accepted, and how long rounds take."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from pacing_world import SPEC

from eyas.common.config import SpeculationConfig
from eyas.common.types import RequestDraftLimits
from eyas.engine.speculation.depth import (
    AcceptanceRates,
    RoundTimes,
    best,
    ladder,
    narrowed,
    price,
    shallower,
)


def test_the_best_depth_gives_the_most_tokens_per_second() -> None:
    tokens, seconds = np.array([1.0, 1.5, 1.8]), np.array([1.0, 1.2, 1.6])
    assert best(tokens, seconds, 0) == 1
    assert best(tokens, np.array([1.0, 1.497, 2.0]), 0) == 0, "hardly better is not changed to"
    assert (
        best(tokens, np.array([1.0, 1.497, 2.0]), 1) == 1
        and best(tokens, np.array([1.0, 1.497, 2.0]), 2) == 1
    )


def test_a_trials_price_is_what_its_rounds_lose() -> None:
    """From plain rounds: one. Deeper: the first has only the drafts of the round before. Shallower: so has
    the first one back."""
    tokens, seconds = np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.5, 2.5])
    rate = 2.0 / 1.5
    assert price(tokens, seconds, 1, 0) == pytest.approx(2 * 1.0 - (3 * 1.0 - 2.0) / rate)
    assert price(tokens, seconds, 1, 2) == pytest.approx(2 * 2.5 - (2.0 + 3.0) / rate)
    assert price(np.array([1.0, 1.1, 1.1]), seconds, 0, 1) == pytest.approx(1.5 - 1.1)
    assert price(tokens, seconds, 0, 1) == pytest.approx(0.04), "what promises more is not free either"


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
    assert narrowed(tree, RequestDraftLimits()) == tree
    assert narrowed(tree, RequestDraftLimits(topk=1)) == SpeculationConfig(5, 1, 6)
    assert narrowed(SpeculationConfig(5, 8, 4), RequestDraftLimits(topk=1)) == SpeculationConfig(3, 1, 4)
    assert narrowed(tree, RequestDraftLimits(steps=1)) == SpeculationConfig(1, 8, 9)
    assert narrowed(tree, RequestDraftLimits(draft_tokens=3)) == SpeculationConfig(2, 8, 3)
    assert narrowed(SPEC, RequestDraftLimits(draft_tokens=4)) == SpeculationConfig(3, 1, 4)
    assert narrowed(shallower(SPEC, 1), RequestDraftLimits(steps=5)) == shallower(SPEC, 1)
    deepest = [
        limits.deepest
        for limits in (RequestDraftLimits(), RequestDraftLimits(4), RequestDraftLimits(4, 0, 3))
    ]
    assert deepest == [0, 4, 2]


# --- acceptance ------------------------------------------------------------------------------------------


def rates(acceptance: AcceptanceRates, slot: int, occupancy: int = 0, most: int = 3) -> list[float]:
    """Of one sequence, by depth."""
    tokens = acceptance.tokens(np.array([slot]), np.array([occupancy]), np.array([most]))
    gains = np.diff(tokens)
    return [float(gains[0]), *(gains[1:] / np.maximum(gains[:-1], 1e-9)).tolist()]


def test_rates_are_conditional_and_each_sequence_has_its_own() -> None:
    acceptance = AcceptanceRates(4, 3)
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
    acceptance = AcceptanceRates(2, 3)
    tokens = acceptance.tokens(np.array([0, 1]), np.array([0, 0]), np.array([0, 2]))
    assert tokens[0] == 2.0 and tokens[1] == pytest.approx(2.7) and tokens[2] == tokens[3]


def test_unseen_depths_are_believed_as_the_one_above() -> None:
    acceptance = AcceptanceRates(1, 3)
    one = np.array([0])
    for _ in range(500):
        acceptance.seen(one, one, np.array([0]), np.array([1]))
    assert rates(acceptance, 0)[0] < 0.05
    for _ in range(2000):
        acceptance.seen(one, one, np.array([1]), np.array([1]))
    assert rates(acceptance, 0)[1:] == pytest.approx([0.95, 0.95], abs=0.05)


def test_what_cannot_be_chance_replaces_what_was_before() -> None:
    """And deeper depths, of which nothing new was seen, are believed as this one again."""
    acceptance, one = AcceptanceRates(1, 3), np.array([0])
    for accepted in (2, 0) * 400:
        acceptance.seen(one, one, np.array([accepted]), np.array([3]))
    assert rates(acceptance, 0)[0] == pytest.approx(0.5, abs=0.1) and rates(acceptance, 0)[2] < 0.1
    for _ in range(40):
        acceptance.seen(one, one, np.array([1]), np.array([1]))
    assert min(rates(acceptance, 0)) > 0.75


# --- times -----------------------------------------------------------------------------------------------


def test_times_between_those_that_are_known() -> None:
    times = RoundTimes()
    for batch, steps in itertools.product((1, 16), (0, 3)):
        times.measured(batch, steps, 0.004 * batch**0.5 * (1 + steps * batch / 16))
    assert times.seconds(16, 3) == pytest.approx(0.004 * 4 * 4)
    assert times.seconds(4, 0) == pytest.approx(0.008), "on a straight line of logarithms"
    low, high = 1 + 3 / 16, 4.0
    deep = 0.008 * (low * high) ** 0.5
    assert times.seconds(4, 3) == pytest.approx(deep)
    times.learn(4, 0, 0.010)
    assert times.seconds(4, 0) == pytest.approx(0.0091), "the first round of a depth counts half"
    assert times.seconds(4, 3) == pytest.approx(deep + 0.0001), "and for all depths a little, in seconds"


@pytest.mark.parametrize("seconds", [0.0, -1e-3])
def test_no_time_at_all_says_nothing(seconds: float) -> None:
    """Of a first round it would be all that is known, and a depth that takes none beats every other."""
    times, fresh = RoundTimes(), RoundTimes()
    times.learn(4, 3, seconds)
    assert times.seconds(4, 3) == fresh.seconds(4, 3) > 0.0
    times.learn(4, 3, 0.006)
    times.learn(4, 3, seconds)
    assert times.seconds(4, 3) == 0.006


def test_what_all_depths_have_in_common_is_learnt_of_one() -> None:
    """Contexts grow, and so does a deep round: by as many seconds, not as large a share."""
    times = RoundTimes()
    times.measured(64, 0, 0.005)
    times.measured(64, 5, 0.010)
    for ms in np.linspace(5, 9, 300):
        times.learn(64, 0, 1e-3 * ms)
    assert times.seconds(64, 0) == pytest.approx(0.009, rel=0.03)
    assert times.seconds(64, 5) == pytest.approx(0.014, rel=0.12)
    before = times.seconds(64, 0)
    times.learn(64, 0, 9.0)
    assert times.seconds(64, 0) < 1.1 * before, "an interrupted round says little"


def test_a_depths_first_rounds_say_most_about_itself() -> None:
    times = RoundTimes()
    times.measured(1, 0, 0.004)
    times.measured(1, 5, 0.006)
    for _ in range(50):
        times.learn(1, 0, 0.004)
    for _ in range(4):
        times.learn(1, 5, 0.005)
    assert times.seconds(1, 5) == pytest.approx(0.005, rel=0.05), "and so do those after many of others"
    assert times.seconds(1, 0) == pytest.approx(0.004, rel=0.05)


def test_a_batch_that_gets_faster_has_no_depth_that_takes_nothing() -> None:
    times = RoundTimes()
    times.measured(1, 0, 0.001)
    times.measured(1, 5, 0.060)
    times.learn(1, 5, 0.002)
    assert times.seconds(1, 0) == pytest.approx(0.0005)


def test_before_anything_is_known_drafting_costs_something() -> None:
    times = RoundTimes()
    guesses = [times.seconds(8, steps) for steps in (0, 1, 5)]
    assert guesses[0] < guesses[1] < guesses[2] < 2 * guesses[0]
