"""One draft worker for four decode workers against one for each, in simulated time: what waiting costs.

A sequence of the simulation is a decode worker here: its batch commits and is drafted for as one.
"""

from __future__ import annotations

import pytest

from eyas.engine.speculation.draft_worker.outcome_runs import MOST_ROUNDS
from tests.unit.simulated_drafter import Costs, SimulatedDrafter

SECONDS = 60.0
WORKERS = 4
VERIFY_S = {1: 0.0043, 8: 0.0045, 32: 0.0052}
"""Seconds of a round, by batch: an 8B model on one H200 with chains of three."""


def costs(batch: int, hit: float, forward_s: float = 0.00025) -> Costs:
    """`forward_s`: of the head, what a draft adds to a round on the same GPU."""
    return Costs(forward_s, 2e-6 * batch, VERIFY_S[batch], steps=3, hit=hit)


def shared_over_private(one: Costs, *, ahead: bool) -> float:
    """Tokens per second of four decode workers."""
    together = SimulatedDrafter(one, WORKERS, ahead=ahead).run(SECONDS)
    return together / (WORKERS * SimulatedDrafter(one, 1, ahead=ahead).run(SECONDS))


@pytest.mark.parametrize("hit", [0.0, 0.5, 0.8, 1.0])
def test_few_sequences_that_are_drafted_ahead_for_lose_less_than_five_percent(hit: float) -> None:
    assert WORKERS <= MOST_ROUNDS, "one sequence each is drafted ahead for"
    assert shared_over_private(costs(1, hit), ahead=True) >= 0.95


@pytest.mark.parametrize("batch", VERIFY_S)
def test_without_drafting_ahead_no_batch_does(batch: int) -> None:
    assert shared_over_private(costs(batch, 0.0), ahead=False) >= 0.95


def test_large_batches_that_were_drafted_ahead_for_would_lose_more() -> None:
    """Eight outcomes for each of 32 sequences are a long forward, and three other workers wait for it."""
    assert shared_over_private(costs(32, 0.8), ahead=True) < 0.95


def test_a_slow_head_is_noticed() -> None:
    assert shared_over_private(costs(1, 0.0, forward_s=0.002), ahead=False) < 0.9
