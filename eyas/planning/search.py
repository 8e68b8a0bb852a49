"""The request of `eyas plan`, and the best layout for it.

A request is a kind of worker, a load and targets, checked before anything is simulated. What no number
of workers can meet is refused. Layouts are compared by the goodput of each, and for a rate by the number of
workers that it needs: the closed-form estimate says where to look, the simulator what is there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from eyas.bench.records import LatencySlo
from eyas.common.errors import ConfigError
from eyas.common.step_times import prompt_s
from eyas.planning.memory import ModelMemory
from eyas.simulator.cluster import ClusterLayout, ClusterShape
from eyas.simulator.goodput import ATTAINMENT, Draw, GoodputKnee, SearchEffort, best_knee, measure
from eyas.simulator.hardware import WorkerHardware, example, read_hardware
from eyas.simulator.workload import BLOCK_TOKENS, RandomTraffic, means, poisson
from gateway.routing.capacity import RequestMix, capacity
from gateway.routing.placement import LatencyTargets, MeasuredRates

STEP = 1 / 32
"""By this part of all workers, or by one, a split beside the estimated best has more or fewer for prompts."""
LARGE = 16
"""A simulation of this number of workers, or of more, takes long."""
ROUGH = 1.05
"""To this factor the knee of a large cluster is searched."""
MOST_WORKERS = 4096
DRAWN = 400
"""Requests from which the means of a load are taken."""


@dataclass(frozen=True)
class LayoutOption:
    """A layout of `workers`, `prefill` of them for prompts (if it is split), and the rate it bears."""

    layout: ClusterLayout
    workers: int
    prefill: int
    knee: GoodputKnee

    @property
    def per_worker(self) -> float:
        """Requests per second and worker within the targets."""
        return self.knee.rate / self.workers


def layouts(inquiry: PlanRequest, workers: int) -> list[LayoutOption]:
    """Returns the capacity of each layout: unified, the best split if there are two workers or more, and
    auto.
    """
    guess = max(capacity(inquiry.mix, workers, 0, inquiry.rates), 1.0)
    options = [_best(inquiry, ClusterLayout.UNIFIED, workers, [0], guess)]
    if workers > 1:
        options.append(_best(inquiry, ClusterLayout.SPLIT, workers, likely_splits(inquiry, workers), guess))
        guess = max(option.knee.rate for option in options) or guess
        options.append(_best(inquiry, ClusterLayout.AUTO, workers, [0], guess))
    return options


def likely_splits(inquiry: PlanRequest, workers: int) -> list[int]:
    """Numbers of prefill workers worth a simulation: the best one by the estimate, then those beside it."""
    best, step = _estimated(inquiry, workers), max(1, round(STEP * workers))
    return [n for n in (best, best - step, best + step) if 0 < n < workers]


def needed(inquiry: PlanRequest, layout: ClusterLayout, rate: float) -> tuple[int, int] | None:
    """The fewest workers that bear `rate`, and how many of them compute prompts; None: not even MOST_WORKERS.

    A split needs a worker for each role; fewer than the answer were tried, too.
    """
    workers = _first_guess(inquiry, layout, rate)
    if workers is None:
        return None
    fewest = _bearing(inquiry, layout, workers, rate)
    while fewest is None:
        workers += max(workers // 20, 1)
        if workers > MOST_WORKERS:
            return None
        fewest = _bearing(inquiry, layout, workers, rate)
    least = 2 if layout is ClusterLayout.SPLIT else 1
    while workers > least and (fewer := _bearing(inquiry, layout, workers - 1, rate)) is not None:
        workers, fewest = workers - 1, fewer
    return workers, fewest


def _best(
    inquiry: PlanRequest, layout: ClusterLayout, workers: int, prefilling: list[int], guess: float
) -> LayoutOption:
    """The best of a layout's numbers of prefill workers."""
    shapes = [ClusterShape(inquiry.hardware, workers, layout, inquiry.targets, n) for n in prefilling]
    effort = inquiry.effort if workers < LARGE else replace(inquiry.effort, precision=ROUGH)
    shape, knee = best_knee(shapes, inquiry.draw, effort, guess)
    return LayoutOption(layout, workers, shape.prefill, knee)


def _estimated(inquiry: PlanRequest, workers: int) -> int:
    mix, rates = inquiry.mix, inquiry.rates
    return max(range(1, workers), key=lambda n: capacity(mix, workers, n, rates))


def _prefilling(inquiry: PlanRequest, layout: ClusterLayout, workers: int) -> Iterator[int]:
    """The numbers of prefill workers that are worth a simulation."""
    yield from (likely_splits(inquiry, workers) if layout is ClusterLayout.SPLIT else [0])


def _first_guess(inquiry: PlanRequest, layout: ClusterLayout, rate: float) -> int | None:
    """Estimates the number of workers, doubling from one worker and then scaling down."""
    workers = 2
    while workers <= MOST_WORKERS:
        prefill = _estimated(inquiry, workers) if layout is ClusterLayout.SPLIT else 0
        bears = capacity(inquiry.mix, workers, prefill, inquiry.rates)
        if bears >= rate:
            return max(round(workers * rate / bears), 2 if layout is ClusterLayout.SPLIT else 1)
        workers *= 2
    return None


def _bearing(inquiry: PlanRequest, layout: ClusterLayout, workers: int, rate: float) -> int | None:
    """Returns the number of prefill workers with which this layout bears the rate; None: it does not."""
    for prefill in _prefilling(inquiry, layout, workers):
        shape = ClusterShape(inquiry.hardware, workers, layout, inquiry.targets, prefill)
        if measure(shape, inquiry.draw, rate, inquiry.effort).attainment >= ATTAINMENT:
            return prefill
    return None


@dataclass(frozen=True)
class PlanRequest:
    """A kind of worker, a load and its targets; `effort`: how long loads are that are simulated."""

    hardware: WorkerHardware
    traffic: RandomTraffic
    targets: LatencyTargets
    effort: SearchEffort

    @property
    def draw(self) -> Draw:
        """Draws the load."""
        return partial(poisson, self.traffic)

    @property
    def mix(self) -> RequestMix:
        """The load as the closed-form estimate sees it: shared prefixes count as cached."""
        prompt, output, spread = means(poisson(self.traffic, 1.0, DRAWN, self.effort.seed))
        cached = int(prompt * self.traffic.shared) // BLOCK_TOKENS * BLOCK_TOKENS
        return RequestMix(prompt, prompt - cached, output, spread)

    @property
    def rates(self) -> MeasuredRates:
        """The rates of these workers, as the gateway's policy would measure them."""
        return MeasuredRates(self.hardware.times, self.hardware.budget, self.targets)


def read_memory(args: argparse.Namespace) -> ModelMemory | None:
    """The memory of the model of a command line; None: it names none, and the rates say what fits."""
    return (
        None
        if args.model is None
        else ModelMemory.of(args.model, args.gpu_gib, args.kv_cache_dtype, args.state_slots)
    )


def read_inquiry(args: argparse.Namespace, memory: ModelMemory | None = None) -> PlanRequest:
    """The inquiry of a command line. Raises ConfigError, naming the flag, for what has no answer."""
    hardware = example() if args.rates is None else read_hardware(args.rates)
    if memory is not None:
        hardware = memory.worker(hardware)
    traffic = RandomTraffic(args.input_len, args.output_len, args.range_ratio, args.prefix_share)
    effort = SearchEffort(seconds=args.seconds, seed=args.seed)
    inquiry = PlanRequest(hardware, traffic, parse_targets(args.slo), effort)
    check(inquiry)
    return inquiry


def parse_targets(text: str) -> LatencyTargets:
    """Bounds on TTFT and TPOT from text like ttft=1s,tpot=15ms; both are needed. Raises ConfigError."""
    bounds = LatencySlo.parse(text).bounds_s
    for name in ("ttft", "tpot"):
        if not bounds.get(name):
            raise ConfigError(f"--slo: {name} is missing, or 0", param="slo")
    if "e2e" in bounds:
        raise ConfigError("--slo: a plan knows ttft and tpot, not e2e", param="slo")
    return LatencyTargets(bounds["ttft"], bounds["tpot"])


def check(inquiry: PlanRequest) -> None:
    """Raises ConfigError for a request that fits no worker, or that is too slow on a worker of its own."""
    hardware, traffic, targets = inquiry.hardware, inquiry.traffic, inquiry.targets
    if hardware.held(traffic.input_len + traffic.output_len) > hardware.pool_tokens:
        raise ConfigError(
            f"--input-len: {traffic.input_len} tokens and an answer of {traffic.output_len} do not fit into"
            f" the {hardware.pool_tokens} tokens of a worker",
            param="input-len",
        )
    typical = round(inquiry.mix.prompt)
    alone = hardware.times.step_s(1, typical)
    if targets.tpot_s < alone:
        raise ConfigError(
            f"--slo: no number of workers meets tpot={1e3 * targets.tpot_s:g}ms: one sequence alone takes"
            f" {1e3 * alone:.2f} ms per token",
            param="slo",
        )
    missing = round(inquiry.mix.missing)
    first = prompt_s(hardware.times, hardware.budget, missing, 0, 0, 0) + hardware.front_s
    if targets.ttft_s < first:
        raise ConfigError(
            f"--slo: no number of workers meets ttft={1e3 * targets.ttft_s:g}ms: a prompt of {missing}"
            f" tokens alone takes {1e3 * first:.1f} ms",
            param="slo",
        )
