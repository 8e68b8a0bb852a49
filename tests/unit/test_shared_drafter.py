"""One draft worker for four decode workers against one for each, in simulated time: what waiting costs.

A sequence of the simulation is a decode worker here: its batch commits and is drafted for as one.
"""

from __future__ import annotations

import pytest

from eyas.engine.speculation.turns import Turns
from tests.unit.simulated_drafter import Always, Costs, SimulatedDrafter, Ways

SECONDS = 60.0
WORKERS = 4
VERIFY_S = {1: 0.0043, 8: 0.0045, 32: 0.0052}
"""Seconds of a round, by batch: an 8B model on one H200 with chains of three."""


def costs(batch: int, hit: float, forward_s: float = 0.00025) -> Costs:
    """`forward_s`: of the head, what a draft adds to a round on the same GPU."""
    return Costs(forward_s, 2e-6 * batch, VERIFY_S[batch], steps=3, hit=hit)


def shared_over_private(one: Costs, shared: Ways, private: Ways) -> float:
    """Tokens per second of four decode workers."""
    together = SimulatedDrafter(one, WORKERS, shared).run(SECONDS)
    return together / (WORKERS * SimulatedDrafter(one, 1, private).run(SECONDS))


@pytest.mark.parametrize("hit", [0.0, 0.5, 0.8, 1.0])
def test_small_batches_lose_less_than_five_percent(hit: float) -> None:
    assert shared_over_private(costs(1, hit), Turns(), Turns()) >= 0.95


@pytest.mark.parametrize("batch", VERIFY_S)
def test_without_drafting_ahead_no_batch_does(batch: int) -> None:
    assert shared_over_private(costs(batch, 0.0), Always(False), Always(False)) >= 0.95


def test_large_batches_that_are_drafted_ahead_for_lose_more() -> None:
    """Eight outcomes for each of 32 sequences are a long forward, and three other workers wait for it."""
    assert 0.85 < shared_over_private(costs(32, 0.8), Turns(), Turns()) < 0.95


def test_a_slow_head_is_noticed() -> None:
    assert shared_over_private(costs(1, 0.0, forward_s=0.002), Always(False), Always(False)) < 0.9
