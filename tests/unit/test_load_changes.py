"""One cluster under one load after another: `auto` has to forget the load before."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from eyas.simulator.cluster import ClusterLayout, ClusterShape, play
from eyas.simulator.goodput import outcome
from eyas.simulator.hardware import example
from eyas.simulator.workload import SimulatedRequest
from gateway.routing import preference
from tests.gpu.pair_workloads import TARGETS, WORKLOADS

DAY = ("chats", "bursts", "8192/256", "256/512", "1024/1024", "2000/1000", "8192/256", "bursts", "chats")
SHARES = (0.8, 0.92)
REACH = 0.97
APART = 1 << 24  # block ids of two loads have nothing in common


def kept(names: tuple[str, ...], share: float, layout: ClusterLayout) -> list[float]:
    """The part of each load's requests that keep the targets, after the load's own warm-up."""
    arrivals: list[SimulatedRequest] = []
    spans, begins_s = [], 0.0
    for number, name in enumerate(names):
        load = WORKLOADS[name]
        drawn = load.arrivals(load.near([share])[0], number + 1)
        for arrival in drawn:
            blocks = tuple(block + APART * number for block in arrival.blocks)
            arrivals.append(replace(arrival, at_s=begins_s + arrival.at_s, blocks=blocks))
        spans.append((begins_s + load.warm_s, begins_s + load.seconds))
        begins_s += load.seconds + load.drain_s(drawn)
    shape = ClusterShape(example(), 2, layout, TARGETS, int(layout is ClusterLayout.SPLIT))
    played = play(shape, arrivals)
    found = []
    for begin_s, end_s in spans:
        until = replace(played, jobs=[job for job in played.jobs if job.arrival.at_s < end_s])
        found.append(outcome(until, TARGETS, begin_s).attainment)
    return found


def ratio(names: tuple[str, ...], share: float) -> float:
    """The smallest over the loads: `auto` over the better static layout."""
    unified, split, auto = (kept(names, share, layout) for layout in ClusterLayout)
    return min(found / max(pair) for found, *pair in zip(auto, unified, split, strict=True) if max(pair))


def test_long_prompts_after_short_ones_are_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("256/512", "8192/256")
    assert ratio(names, 0.92) >= REACH
    with monkeypatch.context() as patch:
        patch.setattr(preference, "OTHER", math.inf)
        assert ratio(names, 0.92) < 0.9, "fading alone would have done"


@pytest.mark.slow
@pytest.mark.parametrize(
    "share", [pytest.param(share, marks=() if share == SHARES[0] else pytest.mark.slow) for share in SHARES]
)
def test_a_day_of_loads(share: float) -> None:
    assert ratio(DAY, share) >= REACH
