"""One draft worker for four decode workers against one for each, in simulated time: what waiting costs.

A sequence of the simulation is a decode worker here: its batch commits and is drafted for as one.
"""

from __future__ import annotations

import pytest

from tests.unit.simulated_drafter import Costs, SimulatedDrafter

SECONDS = 60.0
WORKERS = 4
VERIFY_S = {1: 0.0043, 8: 0.0045, 32: 0.0052}
"""Seconds of a round, by batch: an 8B model on one H200 with chains of three."""


def shared_over_private(batch: int, forward_s: float = 0.00025) -> float:
    """Tokens per second of four decode workers. `forward_s`: of the head, what a draft adds to a round on the
    same GPU.
    """
    costs = Costs(forward_s, 2e-6 * batch, VERIFY_S[batch], steps=3)
    together = SimulatedDrafter(costs, WORKERS).run(SECONDS)
    return together / (WORKERS * SimulatedDrafter(costs, 1).run(SECONDS))


@pytest.mark.parametrize("batch", VERIFY_S)
def test_no_batch_loses_more_than_five_percent(batch: int) -> None:
    assert shared_over_private(batch) >= 0.95


def test_a_slow_head_is_noticed() -> None:
    assert shared_over_private(1, forward_s=0.002) < 0.9
