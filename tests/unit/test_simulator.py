"""The simulator against queueing theory, against what was measured, and against itself."""

from __future__ import annotations

import ast
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from eyas.bench.cases import make_case
from eyas.common.prompt_room import StepBudget, rows_of
from eyas.common.step_times import PiecewiseCurve, StepTimes, prompt_s
from eyas.simulator.cluster import ClusterLayout, ClusterShape, SimulationResult, play
from eyas.simulator.goodput import (
    ATTAINMENT,
    LoadOutcome,
    SearchEffort,
    find_knee,
    measure,
    outcome,
    quantile,
    tpot_s,
    ttft_s,
)
from eyas.simulator.hardware import example
from eyas.simulator.worker import BlockCache
from eyas.simulator.workload import (
    BLOCK_TOKENS,
    ChatTraffic,
    RandomTraffic,
    SimulatedRequest,
    chats,
    means,
    poisson,
)
from gateway.routing.capacity import RequestMix, steady
from gateway.routing.placement import LatencyTargets, MeasuredRates
from gateway.routing.preference import DemandMeter
from tests import shape
from tests.unit.crossed import crossed

CONSTANT = replace(
    example(),
    times=StepTimes(PiecewiseCurve(((0, 10.0), (1, 10.0))), PiecewiseCurve(((0, 0.0), (1, 0.0))), 0.0),
    budget=StepBudget(100, 100),
    front_s=0.0,
    link_s=0.0,
)
"""Every step takes 10 ms, and computes one prompt of 100 tokens."""

TARGETS = LatencyTargets(1.0, 0.008)
SMALL = replace(example(), pool_tokens=20_000, max_running=8, max_waiting=4)


def run(
    layout: ClusterLayout, arrivals: Sequence[SimulatedRequest], workers: int = 2, prefill: int = 0
) -> SimulationResult:
    return play(ClusterShape(example(), workers, layout, TARGETS, prefill), arrivals)


# --- links ---------------------------------------------------------------------------------------------


def second_token_s(chunk_s: float, prompts: int = 1, prefill: int = 1) -> float:
    """When the last of `prompts` of 300 tokens each has two tokens; a chunk's pages travel for `chunk_s`."""
    hardware = replace(CONSTANT, link_bytes_per_s=100 * CONSTANT.kv_bytes_per_token / chunk_s)
    shape = ClusterShape(hardware, prefill + 1, ClusterLayout.SPLIT, TARGETS, prefill)
    played = play(shape, [SimulatedRequest(0.0, 300, 2)] * prompts)
    return max(job.end_s or 0.0 for job in played.jobs)


@pytest.mark.parametrize(("chunk_s", "arrived_s"), [(0.005, 0.035), (0.025, 0.085)])
def test_a_link_slower_than_prompts_carries_the_pages_of_every_chunk(
    chunk_s: float, arrived_s: float
) -> None:
    assert second_token_s(chunk_s) == pytest.approx(arrived_s + 0.01)


def test_workers_that_prefill_share_the_link_of_the_one_that_decodes() -> None:
    both_s = 0.01 + 6 * 0.025  # six chunks, one after the other
    assert second_token_s(0.025, prompts=2, prefill=2) == pytest.approx(both_s + 0.01)


# --- queueing theory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("busy", crossed([0.1, 0.5, 0.8], quick=lambda busy: busy == 0.5))
def test_prompts_wait_as_in_an_m_d_1_queue(busy: float) -> None:
    arrivals = poisson(RandomTraffic(100, 1), busy / 0.01, 10_000, seed=3)
    played = play(ClusterShape(CONSTANT, 1, ClusterLayout.UNIFIED, TARGETS), arrivals)
    mean = sum(ttft_s(job, 0.0) for job in played.jobs) / len(played.jobs)
    waiting = busy * 0.01 / (2 * (1 - busy))
    assert mean - 0.01 == pytest.approx(waiting, rel=0.1)


def test_a_saturated_worker_serves_at_its_rate_and_refuses_the_rest() -> None:
    arrivals = poisson(RandomTraffic(100, 1), 1.5 / 0.01, 6000, seed=3)
    played = play(ClusterShape(CONSTANT, 1, ClusterLayout.UNIFIED, TARGETS), arrivals)
    served = len(played.jobs) - len(played.refused)
    assert served / played.end_s == pytest.approx(1 / 0.01, rel=0.01)
    assert len(played.refused) == pytest.approx(2000, abs=400)
    longest = max(ttft_s(job, 0.0) for job in played.jobs if job.end_s is not None)
    assert longest <= 0.01 * (CONSTANT.max_waiting + 2)


@pytest.mark.parametrize(
    ("prefill", "burst"),
    crossed((0, 1), (1, 4, 16), quick=lambda prefill, burst: burst == (4 if prefill else 1)),
)
def test_one_request_in_ten_is_slower_than_the_closed_form_says(prefill: int, burst: int) -> None:
    """Whether requests come one by one or in bunches, and whether two workers do both or one each.

    A request at the tail is taken to come in a large bunch and to meet many others too. So the estimate for
    large bunches, here all of one size, is up to a fifth above the simulation.
    """
    layout, most = ClusterLayout.SPLIT if prefill else ClusterLayout.UNIFIED, 0.2 if burst > 4 else 0.1
    rates, mix = (
        MeasuredRates(example().times, example().budget, TARGETS),
        RequestMix(1024, 1024, 256, burst=burst),
    )
    for rate in (8.0, 16.0):
        played = run(layout, poisson(RandomTraffic(1024, 256, burst=burst), rate, 2000, 1), 2, prefill)
        tail = quantile(sorted(tpot_s(job) for job in played.jobs), 0.9)
        assert 0.9 * tail <= steady(mix, rate, 2, prefill, rates).tpot_s <= (1.0 + most) * tail


def test_streams_alone_have_the_time_of_their_step() -> None:
    played = play(ClusterShape(CONSTANT, 1, ClusterLayout.UNIFIED, TARGETS), [SimulatedRequest(0.0, 100, 50)])
    assert ttft_s(played.jobs[0], 0.0) == pytest.approx(0.01)
    assert tpot_s(played.jobs[0]) == pytest.approx(0.01)


def test_an_arrival_waits_for_the_step_that_runs_and_the_one_launched_behind_it() -> None:
    played = play(
        ClusterShape(CONSTANT, 1, ClusterLayout.UNIFIED, TARGETS),
        [SimulatedRequest(0.0, 100, 500), SimulatedRequest(1.003, 64, 5)],
    )
    assert ttft_s(played.jobs[1], 0.0) == pytest.approx(0.007 + 0.01 + 0.01)


# --- what holds in every world -------------------------------------------------------------------------

LOADS = {
    "alike": poisson(RandomTraffic(1024, 200), 20.0, 400, 1),
    "mixed": poisson(RandomTraffic(8192, 400, 0.01), 6.0, 300, 2),
    "shared": poisson(RandomTraffic(4096, 100, 0.5, shared=0.8, prefixes=3), 12.0, 300, 3),
    "bursts": poisson(RandomTraffic(512, 64, burst=16), 40.0, 400, 4),
    "single tokens": poisson(RandomTraffic(300, 1), 50.0, 300, 5),
    "chats": chats(ChatTraffic(5, 400, 120, 3.0), 20.0, 300, 6),
}
SHAPES = [
    (ClusterLayout.UNIFIED, 3, 0),
    (ClusterLayout.SPLIT, 3, 1),
    (ClusterLayout.SPLIT, 3, 2),
    (ClusterLayout.AUTO, 3, 0),
]


@pytest.mark.parametrize(("load", "small"), crossed(LOADS, (False, True), quick=lambda load, small: small))
def test_every_request_ends_once_and_nothing_is_left(load: str, small: bool) -> None:
    for layout, workers, prefill in SHAPES:
        hardware = SMALL if small else example()
        played = play(ClusterShape(hardware, workers, layout, TARGETS, prefill), LOADS[load])
        assert len(played.jobs) == len(LOADS[load])
        refused = {job.number for job in played.refused}
        for job in played.jobs:
            if job.number in refused:
                assert job.end_s is None
                continue
            assert job.first_s is not None and job.end_s is not None
            assert job.arrival.at_s < job.first_s <= job.end_s
            assert (job.end_s > job.first_s) == (job.arrival.output > 1)
            assert not (layout is ClusterLayout.UNIFIED and job.apart)
            assert layout is not ClusterLayout.SPLIT or job.prefill < prefill <= job.decode
        for worker in played.workers:
            left = (worker.idle, worker.queued, worker.reserved, worker.context, worker.sequences)
            assert left == (True, 0, 0, 0, 0)


def test_a_request_that_fits_no_worker_is_refused() -> None:
    played = play(ClusterShape(SMALL, 1, ClusterLayout.UNIFIED, TARGETS), [SimulatedRequest(0.0, 20_000, 1)])
    assert played.refused == played.jobs


@pytest.mark.parametrize("layout", list(ClusterLayout))
def test_the_same_seed_gives_the_same_run(layout: ClusterLayout) -> None:
    def once() -> list[tuple[float | None, float | None, int, int]]:
        arrivals = poisson(RandomTraffic(4000, 300, 0.1), 8.0, 300, 7)
        return [(j.first_s, j.end_s, j.prefill, j.decode) for j in run(layout, arrivals, 2, 1).jobs]

    assert once() == once()


def test_draws_depend_on_the_seed_and_lengths_not_on_the_rate() -> None:
    slow, fast = (poisson(RandomTraffic(1000, 500, 0.2), rate, 50, 1) for rate in (1.0, 4.0))
    assert [(a.prompt, a.output) for a in slow] == [(a.prompt, a.output) for a in fast]
    assert slow[-1].at_s == pytest.approx(4 * fast[-1].at_s)
    assert slow != poisson(RandomTraffic(1000, 500, 0.2), 1.0, 50, 2)
    prompt, output, spread = means(poisson(RandomTraffic(1000, 500, 0.001), 1.0, 5000, 1))
    assert [prompt, output, spread] == pytest.approx([500, 250, 4 / 3], rel=0.05)


def demanded(arrivals: Sequence[SimulatedRequest]) -> RequestMix:
    demand = DemandMeter()
    for arrival in arrivals:
        demand.add_request(arrival.at_s, arrival.prompt, arrival.prompt)
        demand.answered(arrival.output)
    found = demand.mix()
    assert found is not None
    return found


def test_demand_tells_bursts_from_a_rate_that_changes() -> None:
    even = poisson(RandomTraffic(1000, 100), 20.0, 1000, 1)
    assert demanded(even).burst < 2.0
    assert demanded(poisson(RandomTraffic(1000, 100, burst=16), 20.0, 1000, 1)).burst > 8.0
    slower = [replace(a, at_s=even[-1].at_s + a.at_s) for a in poisson(RandomTraffic(1000, 100), 3.0, 60, 2)]
    assert demanded([*even, *slower]).burst < 2.5


def test_demand_follows_the_latest_requests_and_is_silent_about_few() -> None:
    short, long = (
        poisson(RandomTraffic(100, 50), 10.0, 400, 1),
        poisson(RandomTraffic(9000, 50), 10.0, 400, 1),
    )
    assert demanded([*short, *long]).prompt == pytest.approx(9000, rel=0.15)
    demand = DemandMeter()
    demand.add_request(short[0].at_s, 100, 100)
    demand.answered(50)
    assert demand.mix() is None


# --- caches, tables ------------------------------------------------------------------------------------


def test_a_cache_serves_prefixes_and_forgets_the_oldest() -> None:
    cache = BlockCache()
    cache.add((1, 2, 3), 10 * BLOCK_TOKENS)
    assert cache.cached((1, 2, 9), 5000) == 2 * BLOCK_TOKENS
    assert cache.cached((2, 3), 2 * BLOCK_TOKENS) == 2 * BLOCK_TOKENS - 1
    assert cache.cached((9, 1), 5000) == 0
    cache.add((4,), 2 * BLOCK_TOKENS)
    assert len(cache) == 2 and cache.cached((4,), 5000) == BLOCK_TOKENS
    assert cache.cached((1, 2, 3), 5000) == BLOCK_TOKENS  # its end went first


def test_shared_prefixes_make_first_tokens_earlier() -> None:
    alone, shared = (
        outcome(
            run(ClusterLayout.UNIFIED, poisson(RandomTraffic(4096, 64, shared=part), 8.0, 300, 1)),
            TARGETS,
            0.2,
        )
        for part in (0.0, 0.9)
    )
    assert shared.ttft_p50_s < 0.5 * alone.ttft_p50_s


def test_a_curve_is_straight_between_its_points_and_beyond_them() -> None:
    curve = PiecewiseCurve(((1, 2.0), (3, 4.0), (5, 5.0)))
    assert [curve.at(x) for x in (0, 1, 2, 3, 4, 5, 9)] == [2.0, 2.0, 3.0, 4.0, 4.5, 5.0, 7.0]


def test_prompts_take_large_chunks_where_many_wait() -> None:
    budget, times = StepBudget(3072, 512), example().times
    assert rows_of(budget, 0, 4000) == 3072 and rows_of(budget, 40, 1000) == 472
    assert rows_of(budget, 40, 1000, 12_000) == 3032 and rows_of(budget, 500, 1000) == 64
    assert prompt_s(times, budget, 0, 0, 9, 100) == 0.0
    assert prompt_s(times, budget, 2000, 0, 40, 40_000) > prompt_s(times, budget, 2000, 0, 0, 0)


def test_constants_of_the_engine_are_imported() -> None:
    """A number that both use stands in one file, so that neither can change alone."""
    simulated = numbers("eyas/simulator") | numbers("eyas/common/prompt_room.py")
    assert {"MANY_STEPS", "LEAST_ROWS", "LAUNCHED_AHEAD"} <= simulated
    assert simulated & numbers("eyas/engine") == set()


def numbers(place: str) -> set[str]:
    """Names that a file, or a folder's files, give to numbers."""
    path = shape.ROOT / place
    trees = [ast.parse(file.read_text()) for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return {
        target.id
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and type(node.value.value) in (int, float)
    }


# --- against measurements ------------------------------------------------------------------------------


def simulated(case: str) -> LoadOutcome:
    jobs = make_case(case).jobs
    arrivals = [
        SimulatedRequest(job.due_s or 0.0, len(job.turns[0].prompt), job.turns[0].max_tokens) for job in jobs
    ]
    return outcome(run(ClusterLayout.UNIFIED, arrivals, workers=1), TARGETS)


def test_s1k_is_within_ten_percent_but_for_its_first_tokens() -> None:
    """docs/benchmarks.md: 5,384 tokens per second, TPOT 6.36 and 7.69 ms, TTFT 30.9 ms."""
    found = simulated("s1k")
    assert found.output_tokens_per_s == pytest.approx(5384, rel=0.03)
    assert found.tpot_p50_s == pytest.approx(6.36e-3, rel=0.10)
    assert found.tpot_p99_s == pytest.approx(7.69e-3, rel=0.10)
    assert found.ttft_p50_s == pytest.approx(30.9e-3, rel=0.12)


def test_s8k_is_within_ten_percent_but_for_its_first_tokens() -> None:
    """docs/benchmarks.md: 2,428 tokens per second, TPOT 47.2 and 100.2 ms, TTFT 517 ms and 12.3 s."""
    found = simulated("s8k")
    assert found.output_tokens_per_s == pytest.approx(2428, rel=0.10)
    assert found.tpot_p50_s == pytest.approx(47.2e-3, rel=0.10)
    assert found.tpot_p99_s == pytest.approx(100.2e-3, rel=0.10)
    assert found.ttft_p50_s == pytest.approx(0.517, rel=0.45)
    assert found.ttft_p99_s == pytest.approx(12.3, rel=0.15)


# --- layouts -------------------------------------------------------------------------------------------

COMPARED = {
    "tight 8k, where splitting wins": (RandomTraffic(8192, 256), LatencyTargets(1.0, 0.008)),
    "loose 8k, where it changes nothing": (RandomTraffic(8192, 256), LatencyTargets(2.0, 0.015)),
    "long answers, where it loses": (RandomTraffic(2000, 1000), LatencyTargets(0.5, 0.012)),
}


@pytest.mark.parametrize(
    "case",
    [case if "tight 8k" in case else pytest.param(case, marks=pytest.mark.slow) for case in COMPARED],
)
def test_auto_does_not_lose_to_the_better_static_layout(case: str) -> None:
    traffic, targets = COMPARED[case]
    knees = []
    for layout, prefill in ((ClusterLayout.UNIFIED, 0), (ClusterLayout.SPLIT, 1), (ClusterLayout.AUTO, 0)):
        shape = ClusterShape(example(), 2, layout, targets, prefill)
        knees.append(find_knee(shape, partial(poisson, traffic), SearchEffort(seconds=25.0), 4.0).rate)
    assert knees[2] >= 0.97 * max(knees[:2]) > 0


@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 3))])
def test_auto_bears_bunches_at_every_rate_that_the_split_bears(seed: int) -> None:
    """16 requests at once: a knee alone would not show rates below it at which preferences go wrong."""
    draw, effort = partial(poisson, RandomTraffic(1024, 256, burst=16)), SearchEffort(seconds=30.0, seed=seed)
    split, auto = (
        ClusterShape(example(), 2, layout, TARGETS, 1) for layout in (ClusterLayout.SPLIT, ClusterLayout.AUTO)
    )
    for rate in (8.0, 10.0, 12.0, 13.5, 15.0, 16.0, 16.5):
        assert measure(split, draw, rate, effort).attainment >= ATTAINMENT
        assert measure(auto, draw, rate, effort).attainment >= ATTAINMENT


def test_preferences_change_when_the_load_does_and_lose_no_request() -> None:
    """Short prompts, then long ones under a tight target: workers part, and come together again."""
    parts = [
        poisson(RandomTraffic(*lengths), rate, 300, 1)
        for lengths, rate in (((256, 512), 12.0), ((8192, 256), 3.0))
    ]
    phases = [*parts, parts[0]]
    arrivals, start = list[SimulatedRequest](), 0.0
    for phase in phases:
        arrivals += [replace(arrival, at_s=start + arrival.at_s) for arrival in phase]
        start = arrivals[-1].at_s
    played = run(ClusterLayout.AUTO, arrivals)
    assert not played.refused and all(job.end_s is not None for job in played.jobs)
    apart = [sum(job.apart for job in played.jobs[300 * i + 150 : 300 * i + 300]) / 150 for i in range(3)]
    assert apart[0] < 0.1 and apart[1] > 0.8 and 2 <= played.flips <= 6


@pytest.mark.slow
def test_a_day_of_traffic_takes_about_a_minute() -> None:
    """Processor time: other work may run beside it."""
    begun = time.process_time()
    arrivals = poisson(RandomTraffic(2048, 256, 0.1), 3.0, 3 * 86_400, 1)
    played = run(ClusterLayout.AUTO, arrivals)
    assert time.process_time() - begun < 90
    assert not played.refused
    assert all(job.end_s is not None for job in played.jobs)
