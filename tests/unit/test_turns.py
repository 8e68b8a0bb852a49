"""Is drafting ahead kept where it measures better, and given up where it delays others? In simulated time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eyas.engine.speculation.turns import KEPT, PAUSE_S, TRIAL, Rounds, Spent, Turns, better
from tests.unit.simulated_drafter import Always, Costs, SimulatedDrafter

QUIET = Costs()
# name -> costs, sequences, whether drafting ahead is the better way
WORLDS = {
    "one sequence": (QUIET, 1, True),
    "three": (QUIET, 3, True),
    "forwards that take too long to end before the next commit": (replace(QUIET, row_s=5e-5), 2, False),
    "forwards that others wait for": (replace(QUIET, row_s=2e-4), 3, False),
    "outcomes that nothing foresees": (replace(QUIET, hit=0.05), 3, False),
    "a head that bears no predicted features": (replace(QUIET, tokens_after_hit=2.0), 2, False),
    "a verifier that wants the same cores": (replace(QUIET, contention=1.5), 2, False),
}


@pytest.mark.parametrize(("costs", "count", "ahead"), WORLDS.values(), ids=WORLDS)
def test_the_better_way_is_found_and_kept(costs: Costs, count: int, ahead: bool) -> None:
    seconds = 60.0
    speeds = {way: SimulatedDrafter(costs, count, Always(way)).run(seconds) for way in (True, False)}
    assert (speeds[True] > speeds[False]) == ahead, speeds
    assert abs(speeds[True] - speeds[False]) > 0.02 * speeds[False], "the ways are worlds apart"
    assert SimulatedDrafter(costs, count, Turns()).run(seconds) > 0.97 * max(speeds.values())


def test_it_follows_a_change_of_load() -> None:
    turns = Turns()
    world = SimulatedDrafter(QUIET, 3, turns)
    kept = []
    for row_s in (2e-6, 2e-4, 2e-6):
        world.costs = replace(QUIET, row_s=row_s)
        world.run(20.0)  # until the next trial at the latest
        kept.append(sum(turns.ahead for _ in range(200) if world.run(0.05)) > 100)
    assert kept == [True, False, True]


def test_unknown_or_equal_is_not_better() -> None:
    assert not better(Spent(), Spent(1.0, 10.0)) and not better(Spent(1.0, 10.0), Spent())
    assert not better(Spent(1.0, 10.0), Spent(1.0, 10.0))
    assert better(Spent(0.9, 10.0), Spent(1.0, 10.0)) and not better(Spent(1.0, 10.0), Spent(0.9, 10.0))


def told(turns: Turns, rounds: Rounds, seconds: float) -> None:
    turns.round(rounds, 3, rounds.began + seconds)


def test_a_round_between_two_ways_and_a_pause_count_for_neither() -> None:
    turns, rounds = Turns(), Rounds(began=1.0, ways=(False, False))
    for _ in range(TRIAL - 1):
        told(turns, rounds, 0.02)
    told(turns, rounds, PAUSE_S + 1.0)
    assert not turns.ahead, "a pause is no round of the trial"
    told(turns, rounds, 0.02)
    assert turns.ahead
    for _ in range(TRIAL):  # the first was drafted for the other way
        told(turns, rounds, 0.01)
    assert turns.ahead and turns._trying is not None
    told(turns, rounds, 0.01)
    assert turns.ahead and turns._trying is None, "0.01 s per round against 0.02"
    for _ in range(KEPT + 2):
        told(turns, rounds, 0.01)
    assert turns._trying is False, "and then the other way has its turn"
