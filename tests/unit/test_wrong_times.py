"""Clusters whose steps take longer than their workers measured: `auto` has to notice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eyas.common.step_times import StepPace
from eyas.simulator import cluster
from eyas.simulator.cluster import ClusterLayout, ClusterShape, play
from eyas.simulator.goodput import ATTAINMENT, LoadOutcome, outcome
from eyas.simulator.hardware import WorkerHardware, example
from gateway.routing import preference
from gateway.routing.placement import LatencyTargets
from gateway.routing.preference import PaceMemory
from tests import auto_cards
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
NEAR = {("mixed 1.2", "chats"): 0.92}
"""Where the static layouts' knees are 4 % apart: `auto` changes for 5 %."""


MIXED_MS = 0.6
"""What a step with both takes beyond its parts since 2026-11-30, under load. By the built-in table, which is
older, it takes 1.9 ms: small chunks of long prompts would cost streams more than they do.
"""


def with_small_chunks(card: WorkerHardware) -> WorkerHardware:
    """The card, with steps with both of today."""
    return replace(card, times=replace(card.times, mixed_ms=MIXED_MS))


def played(workload: Workload, layout: ClusterLayout, truth: StepPace, rate: float) -> LoadOutcome:
    """Two workers that believe the example's table; `truth`: what their steps take over it."""
    hardware = with_small_chunks(example())
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
        patch.setattr(PaceMemory, "record", lambda *_: None)
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
        assert ratio(workload, truth, share * best) >= NEAR.get((case, name), REACH)


NEVER = {"the first token": LatencyTargets(0.05, 0.008), "later tokens": LatencyTargets(1.0, 0.004)}


@pytest.mark.parametrize("missed", NEVER)
def test_a_target_that_nobody_can_keep_does_not_decide_for_the_others(
    missed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 8,192 tokens takes 0.2 s alone, and a step behind it 4.3 ms. What can be kept is kept."""
    workload = replace(WORKLOADS["8192/256"], targets=NEVER[missed])
    kept = [played(workload, layout, StepPace(), 3.0) for layout in ClusterLayout]
    unified, split, auto = (found.tpot_p99_s for found in kept)
    assert split < 0.008 < unified and auto < 1.1 * split
    assert kept[-1].ttft_p90_s < 1.0
    monkeypatch.setattr(cluster, "within_reach", lambda mix, workers, rates: rates.targets)
    assert played(workload, ClusterLayout.AUTO, StepPace(), 3.0).tpot_p99_s > 0.008


def test_a_layout_is_found_within_a_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cards whose memory is slower than the table's, from the first request on: two H100s had 0.81 of a
    split, as each of the first twenty prompts was computed beside streams, which it slowed down.
    """
    load = replace(WORKLOADS["8192/256"], seconds=36.0, warm_s=0.0, targets=LatencyTargets(1.0, 0.009))
    card = with_small_chunks(auto_cards.memory(1.33))
    split, auto = (
        auto_cards.played(load, layout, card, 3.3).goodput
        for layout in (ClusterLayout.SPLIT, ClusterLayout.AUTO)
    )
    assert auto >= REACH * split
    monkeypatch.setattr(preference, "FIRST", 20)
    late = auto_cards.played(load, ClusterLayout.AUTO, card, 3.3).goodput
    assert late < 0.9 * split


def test_what_is_seen_corrects_an_estimate_that_is_wrong_on_a_fast_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests in bursts: the estimate says that unified workers bear this rate, and a third misses the
    targets.
    """
    load, card = replace(WORKLOADS["bursts"], seconds=80.0), auto_cards.memory(0.6)
    split = auto_cards.played(load, ClusterLayout.SPLIT, card, 33.5).goodput
    assert auto_cards.played(load, ClusterLayout.AUTO, card, 33.5).goodput >= 0.98 * split
    monkeypatch.setattr(preference.TargetMemory, "ended", lambda *_: None)
    assert auto_cards.played(load, ClusterLayout.AUTO, card, 33.5).goodput < 0.95 * split
