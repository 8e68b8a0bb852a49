"""Measured step times: what `fit` makes of a few samples, and how much of an engine's time prompts take."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from eyas.common.config import EngineConfig
from eyas.common.prompt_room import StepBudget
from eyas.common.step_times import WINDOW_S, PiecewiseCurve, PromptShare, StepTimes
from eyas.engine.batch.sequence import SequenceWork
from eyas.engine.loading import step_rates
from eyas.engine.loading.step_rates import StepLimits, StepSample, fastest_chunk, fit, measure
from eyas.simulator.hardware import example

REACH = StepLimits(decoding=128, rows=2048, length=4096)
BUDGET = StepBudget(chunk_tokens=3072, mixed_tokens=512)


def timed(times: StepTimes, sample: StepSample) -> float:
    """Seconds of a sample, if `times` are true."""
    pairs = sample.rows * sample.start + sample.rows**2 / 2
    return times.step_s(sample.decoding, sample.decoding * sample.context, sample.rows, pairs)


def test_a_fit_tells_the_times_of_steps_that_were_not_measured() -> None:
    rows = PiecewiseCurve(((1, 4.0), (8, 4.0), (128, 5.0), (512, 11.0), (4096, 90.0)))
    true = StepTimes(rows, PiecewiseCurve(((0, 0.0), (1 << 20, 30.0))), pairs_ms=0.9, mixed_ms=0.8)
    found = fit(lambda sample: timed(true, sample), REACH, BUDGET, grain=64)
    assert found.grain == 64 and found.pairs_ms == pytest.approx(0.9, rel=0.02)
    for sample in (
        StepSample(1, 1000),
        StepSample(60, 2000),
        StepSample(rows=1024),
        StepSample(rows=1500, start=6000),
        StepSample(16, 3000, rows=1000, start=500),
    ):
        assert timed(found, sample) == pytest.approx(timed(true, sample), rel=0.15)


def test_a_fit_of_a_real_table_is_near_it() -> None:
    true = replace(example().times, grain=1)
    found = fit(lambda sample: timed(true, sample), StepLimits(255, 3071, 8000), BUDGET, grain=1)
    for decoding, context, rows in ((1, 500, 0), (64, 2000, 0), (200, 500, 0), (0, 1, 3000), (32, 1000, 480)):
        sample = StepSample(decoding, context, rows)
        assert timed(found, sample) == pytest.approx(timed(true, sample), rel=0.25)


def test_noise_of_long_steps_is_not_taken_for_the_price_of_mixed_ones() -> None:
    """On a GPU two alike workers said 0.0 and 2.3 ms: 3 % of the 62 ms that a full chunk takes."""
    true = replace(example().times, grain=1)
    for seed in range(20):
        noise = random.Random(seed)
        reach = StepLimits(255, 3071, 8000)
        found = fit(
            lambda one, noise=noise: timed(true, one) * noise.gauss(1.0, 0.02), reach, BUDGET, grain=1
        )
        mixed = StepSample(32, 1000, rows=480)
        assert timed(found, mixed) == pytest.approx(timed(true, mixed), rel=0.12)


@pytest.mark.parametrize(
    "reach", [StepLimits(1, 1, 1), StepLimits(1, 2, 2), StepLimits(7, 5, 3), StepLimits(3, 64, 2)]
)
def test_noise_makes_no_table_that_falls(reach: StepLimits) -> None:
    times = iter([0.01, 0.002, 0.02, 0.001, 0.003, 0.0005, 0.004] * 4)
    found = fit(lambda _: next(times), reach, BUDGET, grain=1)
    steps = [found.step_s(n, 100.0 * n, n, 50.0 * n) for n in (1, 2, 4, 8, 100, 10_000)]
    assert steps == sorted(steps) and steps[0] >= 0.0


def test_a_pool_that_is_too_small_is_not_measured() -> None:
    config = EngineConfig(num_pages=4)
    assert measure(None, config, REACH, 1) is None  # type: ignore[arg-type]
    assert measure(None, replace(config, num_pages=2048, max_running=1), REACH, 1) is None  # type: ignore[arg-type]


@dataclass(frozen=True)
class Flight:
    """A step that ends at `end`."""

    device: Device
    end: float

    @property
    def over(self) -> bool:
        return self.device.now > self.end

    def land(self) -> None:
        self.device.land(self.end)


class Device:
    """A runner on a clock of its own: telling it of a sequence takes the host as long as its pages."""

    drafts = False
    launch_s = 0.0  # of the host, for kernels that no graph holds
    told_s, step_s, land_s = 2e-6, 4e-3, 3e-4  # per page; of any step; of the host when a step has ended

    def __init__(self, ahead: bool) -> None:
        self.ahead = ahead
        self.now = self.free = 100.0  # the host's time, and when the device is free
        self.known: set[tuple[int, int]] = set()
        self.flying = 0

    def launch(self, works: list[SequenceWork]) -> Any:
        seqs = [work.seq for work in works]
        new = [seq for seq in seqs if (seq.slot, seq.occupancy) not in self.known]
        self.known |= {(seq.slot, seq.occupancy) for seq in new}
        self.now += self.told_s * sum(len(seq.pages) for seq in new)
        end = max(self.now, self.free) + self.step_s  # it begins with the first kernel that is there
        self.now += self.launch_s
        self.flying += 1
        assert self.flying <= 1 + self.ahead
        self.free = end = max(self.now, end)
        return Flight(self, end)

    def land(self, end: float) -> None:
        self.flying -= 1
        self.now = max(self.now, end) + self.land_s


@pytest.mark.parametrize("ahead", [True, False])
def test_what_a_sequence_takes_once_is_no_part_of_a_step(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Else long contexts and large batches seem slow, and a cluster that should split does not."""
    device = Device(ahead)
    monkeypatch.setattr(step_rates.time, "monotonic", lambda: device.now)
    config = EngineConfig(num_pages=50_000, max_running=256, chunk_tokens=3072)
    found = measure(device, config, StepLimits(255, 3071, 100_000), 64)  # type: ignore[arg-type]
    assert found is not None
    told_s = 8 * 6250 * device.told_s  # of the sample with long sequences: 25 times a step
    assert told_s > 20 * device.step_s
    wanted = device.step_s + (0.0 if ahead else device.land_s)
    for decoding, context, rows in ((1, 1, 0), (8, 80_000, 0), (200, 20_000, 0), (0, 0, 3000)):
        assert found.times.step_s(decoding, context, rows) == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("launch_s", [0.0, 3e-3, 6e-3])
def test_a_step_that_takes_the_host_long_is_timed_whole(
    monkeypatch: pytest.MonkeyPatch, launch_s: float
) -> None:
    """The device has begun it, or ended it, before the host has launched it: what is left is not its time."""
    device = Device(ahead=True)
    device.launch_s = launch_s
    monkeypatch.setattr(step_rates.time, "monotonic", lambda: device.now)
    config = EngineConfig(num_pages=50_000, max_running=256, chunk_tokens=3072)
    found = measure(device, config, StepLimits(255, 3071, 100_000), 64)  # type: ignore[arg-type]
    assert found is not None
    slower = max(device.step_s, launch_s + device.land_s)
    assert found.times.step_s(0, 0, 768) == pytest.approx(slower, rel=0.1)


@pytest.mark.parametrize(("rows_s", "chosen"), [(21.9e-6, 3072), (22.5e-6, 2048)])
def test_steps_of_prompts_are_as_large_as_is_fastest(
    monkeypatch: pytest.MonkeyPatch, rows_s: float, chosen: int
) -> None:
    """`rows_s`: seconds per row of the largest; 20 us of those of two thirds."""
    device = Device(ahead=True)
    monkeypatch.setattr(step_rates.time, "monotonic", lambda: device.now)
    launch = device.launch

    def by_rows(works: list[SequenceWork]) -> Any:
        count = sum(len(work.tokens) for work in works)
        device.step_s = count * (rows_s if count > 2048 else 20e-6)
        return launch(works)

    device.launch = by_rows  # type: ignore[method-assign]
    config = EngineConfig(num_pages=50_000, max_running=256, chunk_tokens=3072)
    assert fastest_chunk(device, config, StepLimits(255, 3072, 100_000)) == chosen  # type: ignore[arg-type]
    few = replace(config, num_pages=16)
    assert fastest_chunk(None, few, StepLimits(255, 3072, 100_000)) == 3072  # type: ignore[arg-type]


def test_the_share_of_prompts_fades_and_counts_no_time_twice() -> None:
    share = PromptShare()
    assert share.at(5.0) == 0.0
    share.ran(0.0, 100.0, prompts=True)
    assert share.at(100.0) == pytest.approx(1.0)
    share.ran(90.0, 100.0 + WINDOW_S, prompts=False)  # the first 10 s belong to the step before
    assert share.at(100.0 + WINDOW_S) == pytest.approx(0.368, abs=0.001)
    assert share.at(100.0 + 2 * WINDOW_S) == pytest.approx(0.135, abs=0.001)
