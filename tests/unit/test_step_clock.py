"""The clock of steps in flight: what it learns, and when it says nothing."""

from __future__ import annotations

import pytest

from eyas.engine.loop.step_loop import MARGIN_S, StepClock


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def times() -> Clock:
    return Clock()


def test_an_unknown_shape_leaves_no_time(times: Clock) -> None:
    clock = StepClock(times)
    assert clock.spare_s == 0.0
    clock.step_started("a")
    assert clock.spare_s == 0.0


def test_what_is_left_of_a_known_step(times: Clock) -> None:
    clock = StepClock(times)
    clock.step_started("a")
    times.now += 0.010
    clock.step_started("a")
    assert clock.spare_s == pytest.approx(0.010 - MARGIN_S, abs=1e-3)
    times.now += 0.004
    assert clock.spare_s == pytest.approx(0.005, abs=1e-3)
    times.now += 0.004
    clock.record_composing(began=times.now - 0.001)
    assert clock.spare_s == 0.0


def test_the_time_to_compose_is_kept_free_twice(times: Clock) -> None:
    clock = StepClock(times)
    clock.step_started("a")
    times.now += 0.010
    clock.record_composing(began=times.now - 0.002)
    clock.step_started("a")
    assert clock.spare_s == pytest.approx(0.010 - MARGIN_S - 0.004, abs=1e-3)


def test_a_step_that_was_seen_to_end_is_known_by_that(times: Clock) -> None:
    """What the host does before the next step runs is not the step's time."""
    clock = StepClock(times)
    clock.step_started("a")
    times.now += 0.010
    clock.step_ended()
    assert clock.spare_s == 0.0
    times.now += 0.025
    clock.step_started("a")
    assert clock.spare_s <= 0.010


def test_one_slow_step_does_not_teach_to_wait_longer(times: Clock) -> None:
    clock = StepClock(times)
    for took in (0.010, 0.100):
        clock.step_started("a")
        times.now += took
    clock.step_started("a")
    assert clock.spare_s <= 0.010
