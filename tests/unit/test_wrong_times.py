"""Clusters whose steps take longer than their workers measured: `auto` has to notice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eyas.common.step_times import StepPace
from eyas.simulator.cluster import ClusterLayout, ClusterShape, play
from eyas.simulator.goodput import ATTAINMENT, LoadOutcome, outcome
from eyas.simulator.hardware import example
from gateway.routing.preference import PaceMemory
from tests.gpu.pair_workloads import WORKLOADS, Workload

TRUTHS = {
    "as measured": StepPace(),
    "mixed 1.2": StepPace(mixed=1.2),
    "mixed 1.5": StepPace(mixed=1.5),
    "all 1.3": StepPace(1.3, 1.3, 1.3),
}
SHARES = (0.8, 0.95)
MORE_S = 15.0
"""Loads and warm-ups are longer than those of two GPUs: a cold cluster learns at its first requests."""

REACH = 0.97


def played(workload: Workload, layout: ClusterLayout, truth: StepPace, rate: float) -> LoadOutcome:
    """Two workers that believe the example's table; `truth`: what their steps take over it."""
    hardware = example()
    true = replace(hardware, times=replace(hardware.times, pace=truth))
    prefill = int(layout is ClusterLayout.SPLIT)
    shape = ClusterShape(true, 2, layout, workload.targets, prefill, hardware.times)
    return outcome(play(shape, workload.arrivals(rate, 1)), workload.targets, workload.warm_s)


def ratio(workload: Workload, truth: StepPace, rate: float) -> float:
    """The goodput of `auto` over that of the better static layout."""
    unified, split, auto = (played(workload, layout, truth, rate).goodput for layout in ClusterLayout)
    return auto / max(unified, split)


def knee(workload: Workload, layout: ClusterLayout, truth: StepPace) -> float:
    good, bad = workload.knee / 8, workload.knee * 2
    while bad > good * 1.05:
        rate = (good * bad) ** 0.5
        borne = played(workload, layout, truth, rate).attainment >= ATTAINMENT
        good, bad = (rate, bad) if borne else (good, rate)
    return good


def test_slow_mixed_steps_part_chats_and_only_once_they_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    chats = WORKLOADS["chats"]
    assert ratio(chats, TRUTHS["mixed 1.5"], 22.0) >= REACH
    with monkeypatch.context() as patch:
        patch.setattr(PaceMemory, "saw", lambda *_: None)
        assert ratio(chats, TRUTHS["mixed 1.5"], 22.0) < 0.6, "the table alone would have done"
    assert ratio(chats, TRUTHS["as measured"], 20.0) >= REACH


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("case", TRUTHS)
def test_auto_bears_what_the_better_static_layout_bears(case: str, name: str) -> None:
    workload, truth = WORKLOADS[name], TRUTHS[case]
    workload = replace(workload, seconds=workload.seconds + MORE_S, warm_s=workload.warm_s + MORE_S)
    best = max(knee(workload, layout, truth) for layout in (ClusterLayout.UNIFIED, ClusterLayout.SPLIT))
    for share in SHARES:
        assert ratio(workload, truth, share * best) >= REACH
