"""The arithmetic of the campaigns on two GPUs: loads as they are sent, goodput, knees, gaps and landing."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.bench.jobs import LoadJob
from eyas.bench.records import RequestRecord
from eyas.simulator.cluster import ClusterLayout
from eyas.simulator.goodput import SearchEffort, find_knee
from eyas.simulator.hardware import example
from eyas.simulator.workload import BLOCK_TOKENS, ChatTraffic, RandomTraffic, chats, poisson
from gateway.routing.placement import LatencyTargets
from tests.gpu.pair_gaps import ratio, read_gaps
from tests.gpu.pair_landing import Asked, landed
from tests.gpu.pair_layouts import Question, best_split, row
from tests.gpu.pair_load import send
from tests.gpu.pair_report import at_rates, knees
from tests.gpu.pair_rig import Variant
from tests.gpu.pair_runs import Run, bears, read_runs
from tests.gpu.pair_workloads import WORKLOADS, Cluster, add_load, gamma, jobs, simulated, workloads

# --- loads ---------------------------------------------------------------------------------------------


def test_requests_are_sent_as_they_are_simulated() -> None:
    arrivals = chats(ChatTraffic(4, 400, 100, 1.0), 5.0, 60, seed=2)
    sent = jobs(arrivals, 5000, 1, 2)
    for arrival, job in zip(arrivals, sent, strict=True):
        (turn,) = job.turns
        assert (len(turn.prompt), turn.max_tokens, job.due_s) == (
            arrival.prompt,
            arrival.output,
            arrival.at_s,
        )
        assert all(10 <= id < 5000 for id in turn.prompt)  # type: ignore[operator]
    for arrival, job in zip(arrivals, sent, strict=True):
        for other, before in zip(arrivals, sent, strict=True):
            shared = sum(a == b for a, b in zip(arrival.blocks, other.blocks, strict=False)) * BLOCK_TOKENS
            one, two = job.turns[0].prompt, before.turns[0].prompt
            assert one[:shared] == two[:shared]
            assert one is two or one[shared : shared + 16] != two[shared : shared + 16]
    assert jobs(arrivals, 5000, 1, 2) == sent and jobs(arrivals, 5000, 1, 3)[0] != sent[0]


def test_bursts_have_the_rate_and_the_spread_that_were_asked_for() -> None:
    times = [one.at_s for one in gamma(RandomTraffic(10, 10), 20.0, 40_000, seed=1)]
    gaps = np.diff(times)
    assert 1 / gaps.mean() == pytest.approx(20.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.05)


def test_rates_lie_near_the_knee_and_a_run_has_the_same_requests_every_time() -> None:
    for workload in WORKLOADS.values():
        assert workload.rates[-1] == pytest.approx(workload.knee, rel=0.04)
        arrivals = workload.arrivals(workload.rates[0], 1)
        assert arrivals == workload.arrivals(workload.rates[0], 1)
        assert arrivals[-1].at_s < workload.seconds
        assert sum(one.at_s >= workload.warm_s for one in arrivals) >= 30


class Slow:
    """A target that answers after as many seconds as a prompt has tokens."""

    async def ask(self, job: LoadJob, prompt: tuple[int, ...], most: int) -> RequestRecord:
        start = asyncio.get_running_loop().time()
        await asyncio.sleep(len(prompt) * 0.1)
        return RequestRecord(output_tokens=most, start_s=start, latency_s=len(prompt) * 0.1)


async def test_what_does_not_end_in_time_fails_in_its_place() -> None:
    load = [LoadJob.single((1,) * length, 3, 0.1) for length in (1, 90, 2)]
    sent = await send(Slow(), load, 0.6)  # type: ignore[arg-type]
    assert [bool(record.error) for record in sent.records] == [False, True, False]
    assert [record.latency_s for record in sent.records] == pytest.approx([0.1, 0.0, 0.2])
    assert all(0.0 <= record.waited_s < 0.3 for record in sent.records)


# --- goodput -------------------------------------------------------------------------------------------


def run(layout: str, rate: float, kept: float, mixed: int | None = None) -> Run:
    """A run of which the first requests up to the share `kept` are within the targets."""
    count = len(WORKLOADS["8192/256"].arrivals(rate, 1))
    good = [i < kept * count for i in range(count)]
    fields: dict[str, Any] = {
        "layout": layout, "mixed": mixed, "workload": "8192/256", "rate": rate, "seed": 1, "small": False,
        "workers": 2, "targets": (1.0, 0.008),
        "ttft_s": [0.1 if ok else 3.0 for ok in good], "waited_s": [0.0] * count, "tpot_s": [0.005] * count,
        "errors": [""] * count, "client_cpu": 0.1, "client_lag_ms": 0.1, "gateway_cpu": 0.1,
    }  # fmt: skip
    return Run.read(fields)


def test_what_keeps_the_targets_counts() -> None:
    whole = run("split", 3.0, 1.0)
    assert whole.attainment == 1.0
    assert whole.goodput == pytest.approx(3.0, rel=0.2)
    for change in ({"waited_s": 0.95}, {"tpot_s": 0.0081}, {"errors": "lost"}, {"ttft_s": 1.01}):
        ((name, value),) = change.items()
        column = list(whole.fields[name])
        column[-1] = value
        worse = replace(whole, fields={**whole.fields, name: column})
        assert worse.met[-1] == 0.0 and worse.met[:-1].all(), change
        column = [value, *whole.fields[name][1:]]
        assert replace(whole, fields={**whole.fields, name: column}).met.all(), "the warm-up does not count"


@pytest.mark.parametrize(
    ("points", "found"),
    [
        ([(2.0, 0.95), (3.0, 0.85)], (2.5, "")),
        ([(3.0, 0.8), (2.0, 1.0)], (2.5, "")),
        ([(2.0, 0.95), (3.0, 0.9)], (3.0, ">")),
        ([(2.0, 0.5), (3.0, 0.1)], (2.0, "<")),
    ],
)
def test_a_knee_lies_between_rates_or_beyond_them(
    points: list[tuple[float, float]], found: tuple[float, str]
) -> None:
    rate, bound = bears(points)
    assert (pytest.approx(rate), bound) == found


def test_auto_is_compared_with_the_better_static_layout_at_its_best_size() -> None:
    runs = [
        run("unified", 3.0, 0.5),
        run("unified", 3.0, 0.6, 1024),
        run("split", 3.0, 0.9),
        run("auto", 3.0, 0.9),
    ]
    (*_, row) = at_rates(runs)
    better = runs[1].goodput, runs[2].goodput, runs[3].goodput
    for goodput in better:
        assert f"| {goodput:.2f} " in row
    assert f"{runs[2].attainment / runs[1].attainment:.3f}" in row and "1.000 (1.00 to 1.00)" in row
    assert any("| split | <3.00 |" in row or "| split | >3.00 |" in row for row in knees(runs, example()))


def test_a_bound_that_is_not_given_stays() -> None:
    parser = argparse.ArgumentParser()
    add_load(parser)
    (workload,) = workloads(parser.parse_args(["--workloads", "8192/256", "--slo", "ttft=2s"]))
    assert workload.targets == LatencyTargets(2.0, 0.008)


def test_runs_of_other_clusters_are_not_compared(tmp_path: Path) -> None:
    """Of a case that both had, one would stand for the other."""
    one = {"event": "run", **run("split", 3.0, 1.0).fields}
    (tmp_path / "one").write_text(json.dumps(one))
    (tmp_path / "same").write_text(json.dumps(one | {"layout": "unified"}))
    assert len(read_runs([tmp_path / "one", tmp_path / "same"])) == 2
    for other in ({"workers": 8}, {"targets": (2.0, 0.028)}):
        (tmp_path / "other").write_text(json.dumps(one | other))
        with pytest.raises(ValueError, match="several numbers of workers"):
            read_runs([tmp_path / "one", tmp_path / "other"])


def test_the_simulator_plays_the_requests_of_the_run() -> None:
    workload = WORKLOADS["8192/256"]
    arrivals = workload.arrivals(3.3, 1)
    split, unified = (
        simulated(workload, arrivals, Cluster(layout))
        for layout in (ClusterLayout.SPLIT, ClusterLayout.UNIFIED)
    )
    assert split.requests == sum(one.at_s >= workload.warm_s for one in arrivals)
    assert split.attainment > unified.attainment + 0.2


def test_a_layout_is_named_with_its_mixed_step_size() -> None:
    flags = Variant.parse("unified@256").flags
    assert flags == ("--layout", "unified", "--workers", "2", "--mixed-step-tokens", "256")
    eight = replace(Variant.parse("split"), workers=8)
    assert eight.flags == ("--layout", "split", "--prefill", "4", "--decode", "4")
    three = replace(eight, workers=3)
    assert three.flags == ("--layout", "split", "--prefill", "1", "--decode", "2"), "as the simulator has it"
    assert str(Variant.parse("split")) == "split" and str(Variant.parse("auto@512")) == "auto@512"
    for wrong in ("both", "split@", "split@x"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not one of"):
            Variant.parse(wrong)


# --- gaps and landing ------------------------------------------------------------------------------------


def stream(gaps: list[float], error: str = "") -> RequestRecord:
    return RequestRecord(start_s=0.5, ttft_s=0.5, itls_s=gaps, output_tokens=len(gaps) + 1, error=error)


def test_gaps_are_told_apart_by_when_they_end() -> None:
    found = read_gaps([stream([1.0] * 9), stream([2.0] * 2), stream([1.0], "lost")], 3.5, 6.5)
    assert [side.tolist() for side in found.quiet] == [[1.0, 1.0], [2.0]]  # tokens at 2, 3; 3
    assert [side.tolist() for side in found.beside] == [[1.0] * 3, [2.0]]  # at 4, 5, 6; 5
    assert found.whole == 1 and found.counted == 1.0


def test_the_ratio_of_gaps_is_that_of_their_99th_percentiles() -> None:
    rng = np.random.default_rng(1)
    first = [rng.uniform(1.0, 2.0, 400) for _ in range(8)]
    value, low, high = ratio(first, [0.5 * gaps for gaps in first])
    assert (value, low, high) == pytest.approx((0.5, 0.5, 0.5))
    value, low, high = ratio(first, [0.5 * rng.permutation(gaps) for gaps in first[::-1]])
    assert low <= value <= high and low < high


def asked(late: float, bytes: int) -> Asked:
    return Asked(100, 50.0, 5.0 + late, 4.0, 5.0, 40.0, bytes, "nixl")


def test_what_had_not_landed_shows_in_the_gap() -> None:
    brief, short = [asked(1.0, 30_000_000)] * 3, [asked(3.0, 270_000_000)] * 3
    there = landed(
        brief, short, [asked(3.1, 1_050_000_000), asked(3.1, 1_050_000_000), asked(6.0, 1_050_000_000)]
    )
    assert there == {"growth_ms": 0.1, "earlier_ms": 2.0, "link_gb_per_s": 120.0, "within": "2 of 3"}
    assert landed(brief, short, [asked(9.5, 1_050_000_000)] * 3)["growth_ms"] == 6.5
    assert landed(short, short, short)["link_gb_per_s"] is None


# --- layouts of more GPUs --------------------------------------------------------------------------------


@pytest.mark.parametrize("traffic", [RandomTraffic(16384, 64), RandomTraffic(4096, 2048)])
def test_the_best_split_is_that_of_all_of_them(traffic: RandomTraffic) -> None:
    asked = Question(
        4, partial(poisson, traffic), LatencyTargets(1.0, 0.010), SearchEffort(seconds=2.0, fewest=60)
    )
    knees = {
        n: find_knee(asked.shape(ClusterLayout.SPLIT, n), asked.draw, asked.effort, 5.0).rate
        for n in (1, 2, 3)
    }
    prefill, found = best_split(asked, 5.0)
    assert prefill == max(knees, key=lambda n: knees[n])
    assert found.rate == pytest.approx(knees[prefill], rel=0.02)


def test_a_row_tells_each_layout_per_gpu_and_the_ratios() -> None:
    effort = SearchEffort(seconds=2.0, fewest=60)
    asked = Question(2, partial(poisson, RandomTraffic(16384, 256)), LatencyTargets(2.0, 0.015), effort)
    name, gpus, bound, unified, split, auto, over, of_auto = row("long", asked).strip("| ").split(" | ")
    assert (name, gpus, bound) == ("long", "2", "15 ms") and split.endswith(" (1 + 1)")
    assert float(over) == pytest.approx(float(split.split()[0]) / float(unified), abs=0.02)
    assert float(of_auto) == pytest.approx(
        float(auto) / max(float(unified), float(split.split()[0])), abs=0.03
    )
