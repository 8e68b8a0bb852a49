"""The stopwatch of a start."""

from __future__ import annotations

import time

import psutil
import pytest

from eyas.engine.startup import Phases


class Clock:
    def __init__(self) -> None:
        self.now = psutil.Process().create_time() + 6.1

    def __call__(self) -> float:
        return self.now


def test_seconds_by_phase_from_the_start_of_the_process() -> None:
    clock = Clock()
    phases = Phases(clock)
    for name, seconds in (("weights", 3.0), ("kernels", 12.0), ("weights", 1.2)):
        with phases(name):
            clock.now += seconds
    assert phases.summary() == "ready in 22.3 s: import 6.1, weights 4.2, kernels 12.0"
    clock.now += 0.9
    assert phases.summary().endswith("kernels 12.0, other 0.9")


def test_a_phase_that_fails_is_timed_too() -> None:
    clock = Clock()
    phases = Phases(clock)
    with pytest.raises(ValueError), phases("weights"):
        clock.now += 2.0
        raise ValueError
    assert "weights 2.0" in phases.summary()


def test_import_time_is_that_of_this_process() -> None:
    before = time.time() - psutil.Process().create_time()
    said = float(Phases().summary().removeprefix("ready in ").partition(" ")[0])
    assert before - 0.06 <= said <= time.time() - psutil.Process().create_time() + 0.06
