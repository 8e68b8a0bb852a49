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
    Trial,
    best,
    ladder,
    narrowed,
    price,
    shallower,
)
from eyas.engine.speculation.round_times import RoundTimes


def test_the_best_depth_gives_the_most_tokens_per_second() -> None:
    tokens, seconds = np.array([1.0, 1.5, 1.8]), np.array([1.0, 1.2, 1.6])
    assert best(tokens, seconds, 0) == 1
    assert best(tokens, np.array([1.0, 1.497, 2.0]), 0) == 0, "hardly better is not changed to"
    assert (
        best(tokens, np.array([1.0, 1.497, 2.0]), 1) == 1
        and best(tokens, np.array([1.0, 1.497, 2.0]), 2) == 1
    )


def test_a_change_must_pay_for_itself_soon() -> None:
    """Leaving plain rounds and coming back takes half of one; going deeper, the drafts that the first round
    does not have.
    """
    seconds = np.array([1.0, 1.5, 2.5])
    assert best(np.array([1.0, 1.5 * 1.01, 0.0]), seconds, 0) == 0
    assert best(np.array([1.0, 1.5 * 1.03, 0.0]), seconds, 0) == 1
    assert best(np.array([0.0, 1.5, 2.5 * 1.01]), seconds, 1) == 1
    assert best(np.array([0.0, 1.5, 2.5 * 1.04]), seconds, 1) == 2


def test_a_trials_price_is_what_its_rounds_lose() -> None:
    """Of plain rounds: and what it takes to change to them and back. Deeper: the first has only the drafts of
    the round before. Shallower: so has the first one back.
    """
    tokens, seconds = np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.5, 2.5])
    rate = 2.0 / 1.5
    assert price(tokens, seconds, 1, 0) == pytest.approx(5 * (1.0 - 1.0 / rate) + 0.5)
    assert price(tokens, seconds, 1, 2) == pytest.approx(2 * 2.5 - (2.0 + 3.0) / rate)
    assert price(tokens, seconds, 2, 1) == pytest.approx(2 * 1.5 - (3 * 2.0 - 3.0) / (3.0 / 2.5))
    assert price(np.array([1.0, 1.1, 1.1]), seconds, 0, 1) == pytest.approx(2 * (1.5 - 1.1) + 0.5)
    assert price(tokens, seconds, 0, 1) == pytest.approx(0.04), "what promises more is not free either"


def test_a_trial_is_charged_for_its_rounds_and_the_one_after_them() -> None:
    trial = Trial(3, rate=100.0)
    assert trial.lost(1, 0.02, 2) == 0.0 and not trial.over, "in flight as it was chosen"
    assert trial.lost(3, 0.03, 2) == pytest.approx(0.01) and not trial.over
    assert trial.lost(3, 0.03, 4) == pytest.approx(-0.01), "one that goes well costs nothing"
    assert trial.lost(1, 0.02, 1) == pytest.approx(0.01) and trial.over


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


DEPTHS = (0, 3, 5)


def test_times_between_those_that_are_known() -> None:
    times = RoundTimes(DEPTHS)
    for batch, (place, steps) in itertools.product((1, 16), enumerate(DEPTHS)):
        times.measured(batch, steps, 0.004 * batch**0.5 * (1 + steps * batch / 16))
        assert times.seconds(batch)[place] == pytest.approx(0.004 * batch**0.5 * (1 + steps * batch / 16))
    assert times.seconds(4)[0] == pytest.approx(0.008), "on a straight line of logarithms"
    assert times.seconds(4)[1] == pytest.approx(0.008 * ((1 + 3 / 16) * 4.0) ** 0.5)
    assert times.seconds(64).tolist() == times.seconds(16).tolist(), "beyond the last as there"


@pytest.mark.parametrize("seconds", [0.0, -1e-3])
def test_no_time_at_all_says_nothing(seconds: float) -> None:
    """Of a first round it would be all that is known, and a depth that takes none beats every other."""
    times, fresh = RoundTimes(DEPTHS), RoundTimes(DEPTHS)
    times.learn(4, 3, seconds)
    assert times.seconds(4).tolist() == fresh.seconds(4).tolist()
    times.learn(4, 3, 0.006)
    times.learn(4, 3, seconds)
    assert times.seconds(4)[1] == pytest.approx(0.006)


def known(*ms: float, batch: int = 64) -> RoundTimes:
    """Of a start that measured these, one of each of DEPTHS."""
    times = RoundTimes(DEPTHS)
    for depth, one in zip(DEPTHS, ms, strict=True):
        times.measured(batch, depth, 1e-3 * one)
    return times


CONTEXTS = (*range(16, 4000, 40),) * 4


def test_contexts_add_as_many_seconds_at_every_depth() -> None:
    """Though only rounds of one depth were seen with long ones. What hears nothing of keys takes that for a
    share, and believes plain rounds too fast.
    """
    times, deaf = known(5.0, 9.0, 16.0), known(5.0, 9.0, 16.0)
    for context in CONTEXTS:
        seconds = 0.016 + 30e-9 * 64 * context
        times.learn(64, 5, seconds, 64 * context)
        deaf.learn(64, 5, seconds)
    short, long = (1e3 * times.seconds(64, 64 * context) for context in (16, 4000))
    assert short == pytest.approx([5.0, 9.0, 16.0], rel=0.05)
    assert long - short == pytest.approx([0.03 * 0.064 * 3984] * 3, rel=0.1)
    assert 1e3 * deaf.seconds(64)[0] < 0.8 * long[0]


def test_a_hot_card_makes_all_rounds_longer_by_a_share() -> None:
    """So how depths compare, which is what counts, stays as it was."""
    times = known(5.0, 9.0, 16.0)
    for _ in range(200):
        times.learn(64, 5, 1.08 * 0.016)
    seconds = 1e3 * times.seconds(64)
    assert seconds[2] == pytest.approx(1.08 * 16.0, rel=0.01)
    assert seconds[2] / seconds[0] == pytest.approx(16.0 / 5.0, rel=0.03)


def test_a_depth_that_was_measured_wrongly_is_learnt_from_its_own_rounds() -> None:
    """Whatever ran before; and of others it says little."""
    times = known(5.0, 9.0, 16.0)
    for _ in range(200):
        times.learn(64, 0, 0.005)
    for _ in range(12):
        times.learn(64, 5, 0.013)
    seconds = 1e3 * times.seconds(64)
    assert seconds[2] == pytest.approx(13.0, rel=0.08)
    assert seconds[0] == pytest.approx(5.0, rel=0.06)


def test_a_depth_that_is_not_seen_is_doubted_more_and_more() -> None:
    times = known(5.0, 9.0, 16.0)
    for _ in range(50):
        times.learn(64, 3, 0.009)
    before = times.doubt(64, 1)
    for _ in range(500):
        times.learn(64, 3, 0.009)
    after = times.doubt(64, 1)
    assert after[1] == pytest.approx(0.0, abs=1e-9) and all(after[[0, 2]] > before[[0, 2]])


def test_an_interrupted_round_says_little() -> None:
    times = known(5.0, 9.0, 16.0)
    for _ in range(100):
        times.learn(64, 0, 0.005)
    times.learn(64, 0, 9.0)
    assert times.seconds(64)[0] < 1.2 * 0.005


def test_no_depth_takes_nothing() -> None:
    """However much shorter than expected rounds are."""
    times = known(5.0, 9.0, 16.0)
    for _ in range(50):
        times.learn(64, 5, 1e-5, 10_000_000)
    assert min(*times.seconds(64), *times.seconds(64, 10_000_000)) > 0.0


def test_before_anything_is_known_drafting_costs_something() -> None:
    guesses = RoundTimes((0, 1, 5)).seconds(8)
    assert guesses[0] < guesses[1] < guesses[2] < 2 * guesses[0]
