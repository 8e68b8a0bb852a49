"""Measured step times: what `fit` makes of a few samples, and how much of an engine's time prompts take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eyas.common.config import EngineConfig
from eyas.common.prompt_share import WINDOW_S, PromptShare
from eyas.common.step_times import Curve, StepTimes
from eyas.engine.loading.step_rates import Reach, Sample, fit, measure
from eyas.simulator.hardware import example

REACH = Reach(decoding=128, rows=2048, length=4096)


def timed(times: StepTimes, sample: Sample) -> float:
    """Seconds of a sample, if `times` are true."""
    pairs = sample.rows * sample.start + sample.rows**2 / 2
    return times.step_s(sample.decoding, sample.decoding * sample.context, sample.rows, pairs)


def test_a_fit_tells_the_times_of_steps_that_were_not_measured() -> None:
    rows = Curve(((1, 4.0), (8, 4.0), (128, 5.0), (512, 11.0), (4096, 90.0)))
    true = StepTimes(rows, Curve(((0, 0.0), (1 << 20, 30.0))), pairs_ms=0.9, mixed_ms=0.8)
    found = fit(lambda sample: timed(true, sample), REACH, grain=64)
    assert found.grain == 64 and found.pairs_ms == pytest.approx(0.9, rel=0.02)
    for sample in (
        Sample(1, 1000),
        Sample(60, 2000),
        Sample(rows=1024),
        Sample(rows=1500, start=6000),
        Sample(16, 3000, rows=1000, start=500),
    ):
        assert timed(found, sample) == pytest.approx(timed(true, sample), rel=0.15)


def test_a_fit_of_a_real_table_is_near_it() -> None:
    true = replace(example().times, grain=1)
    found = fit(lambda sample: timed(true, sample), Reach(255, 3071, 8000), grain=1)
    for decoding, context, rows in ((1, 500, 0), (64, 2000, 0), (200, 500, 0), (0, 1, 3000), (32, 1000, 480)):
        sample = Sample(decoding, context, rows)
        assert timed(found, sample) == pytest.approx(timed(true, sample), rel=0.25)


@pytest.mark.parametrize("reach", [Reach(1, 1, 1), Reach(1, 2, 2), Reach(7, 5, 3), Reach(3, 64, 2)])
def test_noise_makes_no_table_that_falls(reach: Reach) -> None:
    times = iter([0.01, 0.002, 0.02, 0.001, 0.003, 0.0005, 0.004] * 4)
    found = fit(lambda _: next(times), reach, grain=1)
    steps = [found.step_s(n, 100.0 * n, n, 50.0 * n) for n in (1, 2, 4, 8, 100, 10_000)]
    assert steps == sorted(steps) and steps[0] >= 0.0


def test_a_pool_that_is_too_small_is_not_measured() -> None:
    config = EngineConfig(num_pages=4)
    assert measure(None, config, REACH, 1) is None  # type: ignore[arg-type]
    assert measure(None, replace(config, num_pages=2048, max_running=1), REACH, 1) is None  # type: ignore[arg-type]


def test_the_share_of_prompts_fades_and_counts_no_time_twice() -> None:
    share = PromptShare()
    assert share.at(5.0) == 0.0
    share.ran(0.0, 100.0, prompts=True)
    assert share.at(100.0) == pytest.approx(1.0)
    share.ran(90.0, 100.0 + WINDOW_S, prompts=False)  # the first 10 s belong to the step before
    assert share.at(100.0 + WINDOW_S) == pytest.approx(0.368, abs=0.001)
    assert share.at(100.0 + 2 * WINDOW_S) == pytest.approx(0.135, abs=0.001)
