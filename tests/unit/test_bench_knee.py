"""The search for the highest rate that a server bears, against servers whose limit is known."""

from __future__ import annotations

import pytest

from eyas.bench import sweep


def searched(limit: float) -> dict[float, bool]:
    """Every rate that is tried on a server that bears `limit` requests per second, and whether it did."""
    borne: dict[float, bool] = {}
    while (rate := sweep.next_rate(borne)) is not None:
        assert rate not in borne
        borne[rate] = rate <= limit
    return borne


@pytest.mark.parametrize("limit", [0.03, 0.7, 1.0, 3.3, 16.0, 23.4, 1000.0])
def test_the_knee_is_found_within_a_tenth(limit: float) -> None:
    borne = searched(limit)
    found = sweep.knee(borne)
    assert found is not None and found <= limit < found * sweep.PRECISION
    assert len(borne) <= 16


def test_rates_double_and_then_meet() -> None:
    assert list(searched(5.0)) == [1.0, 2.0, 4.0, 8.0, 5.66, 4.76, 5.19]


def test_a_server_that_bears_nothing_ends_the_search() -> None:
    borne = searched(0.0)
    assert sweep.knee(borne) is None and min(borne) == sweep.LOWEST


def test_a_server_that_bears_everything_ends_the_search() -> None:
    assert sweep.knee(searched(1e9)) == sweep.HIGHEST


def test_a_lucky_rate_above_one_that_was_missed_does_not_count() -> None:
    assert sweep.knee({1.0: True, 2.0: False, 4.0: True}) == 1.0
