"""A part of `python -m tests.e2e.cold_restart`: after the death of all workers a store has their pages."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.cold_restart import Campaign, Turn, compare, undisturbed


@pytest.fixture(scope="module")
def plain() -> Campaign:
    return asyncio.run(undisturbed(6, 6))


@pytest.mark.slow
async def test_new_workers_go_on_with_what_dead_ones_stored(plain: Campaign) -> None:
    found = await compare(plain, store=True)
    assert found.changed == 0 and found.answers == 60
    assert found.after >= 0.9 * found.before > 0.8, found


@pytest.mark.slow
async def test_without_a_store_they_begin_anew(plain: Campaign) -> None:
    """The power of the test above."""
    found = await compare(plain, store=False)
    assert found.changed == 0 and found.after < 0.9 * found.before, found


def test_moments_and_rates() -> None:
    campaign = Campaign("", 2, 1)
    campaign.killed = 10.0
    for key, began, over, cached in (
        ((0, 0), 1.0, 2.0, 0),
        ((0, 1), 2.0, 3.0, 90),
        ((0, 2), 9.0, 10.1, 80),  # was on its way
        ((0, 3), 9.5, 14.0, 40),
        ((1, 1), 14.0, 18.0, 60),
    ):
        campaign.turns[key] = Turn(began, over, (), 100, cached)
    assert campaign.back == 14.0
    assert campaign.hit_rate(0.0, 10.0) == 0.9 and campaign.hit_rate(14.0, 19.0) == 0.5
