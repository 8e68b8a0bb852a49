"""`eyas plan`: what a load needs, told as a table, and the curves of it.

A panel per cluster size shows goodput per GPU over the bound on time per output token.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from eyas.bench import plot_style
from eyas.bench.plot_style import check_plot
from eyas.planning.search import LayoutOption, PlanRequest, layouts, needed, read_inquiry, read_memory
from eyas.simulator.cluster import ClusterLayout
from gateway.routing.placement import LatencyTargets

NOISE = 0.02
"""Layouts within this part of one another are called equal."""
HEAD = "layout     workers  requests/s  per GPU   TTFT p50, p90 ms   TPOT p50, p99 ms"
FACTORS = (0.5, 0.7, 1.4)
"""Bounds that are tried beside the requested one, as factors of it."""


def plan(args: argparse.Namespace) -> int:
    """Answers on standard output: 0, or 1 if no layout meets the targets. Raises ConfigError."""
    if args.plot is not None:
        check_plot(args.plot)
    memory = read_memory(args)
    inquiry = read_inquiry(args, memory)
    if memory is not None:
        print("\n".join(memory.lines(inquiry.hardware, args.input_len + args.output_len)))
    print(f"{inquiry.hardware.name}. Simulated, from rates of: {inquiry.hardware.source}")
    if memory is not None and args.rates is None:
        print(f"Steps take as long as this model's: give those of {memory.needs.model} by --rates.")
    by_workers: dict[int, list[LayoutOption]] = {}
    for workers in args.gpus:
        options = by_workers[workers] = layouts(inquiry, workers)
        print(
            f"\n{workers} GPUs: the highest rate at which 90 % of the requests keep {args.slo}\n{HEAD}",
            flush=True,
        )
        for option in options:
            print(line(option))
        print(verdict(options))
    if args.request_rate is not None:
        print(f"\nFor {args.request_rate:g} requests per second:")
        for layout in ClusterLayout:
            print(f"{layout.value:<9} {demand(inquiry, layout, args.request_rate)}")
    if args.plot is not None:
        plot_plan(inquiry, by_workers, args.plot)
        print(f"\n{args.plot}")
    return 0 if all(any(option.knee.rate for option in options) for options in by_workers.values()) else 1


def line(option: LayoutOption) -> str:
    """One row of the table."""
    outcome, knee = option.knee.outcome, option.knee
    workers = f"{option.prefill}+{option.workers - option.prefill}" if option.prefill else f"{option.workers}"
    start = f"{option.layout.value:<9}{workers:>9}{knee.rate:>12.2f}{option.per_worker:>9.2f}"
    if outcome is None:
        return start + "  not even at a low rate"
    ttft = f"{1e3 * outcome.ttft_p50_s:.0f}, {1e3 * outcome.ttft_p90_s:.0f}"
    tpot = f"{1e3 * outcome.tpot_p50_s:.2f}, {1e3 * outcome.tpot_p99_s:.2f}"
    return f"{start}{ttft:>19}{tpot:>19}"


def verdict(options: list[LayoutOption]) -> str:
    """Whether splitting pays, as a sentence."""
    rates = {option.layout: option.knee.rate for option in options}
    unified, split = rates[ClusterLayout.UNIFIED], rates.get(ClusterLayout.SPLIT)
    if split is None:
        return "One worker has nothing to split."
    if not unified and not split:
        return "Neither layout keeps the targets: loosen them, or shorten the prompts."
    if not split:
        return "Splitting loses: it does not keep the targets at any rate."
    if not unified:
        return "Only splitting keeps the targets."
    change = split / unified - 1
    if abs(change) <= NOISE:
        return "Splitting changes nothing here."
    if change < 0:
        return f"Splitting loses: it bears {-change:.0%} less."
    return f"Splitting wins: it bears {change:.0%} more."


def demand(inquiry: PlanRequest, layout: ClusterLayout, rate: float) -> str:
    """How many workers a rate needs, in words."""
    fewest = needed(inquiry, layout, rate)
    if fewest is None:
        return "does not keep the targets with any number of workers"
    workers, prefill = fewest
    split = f" ({prefill} for prompts, {workers - prefill} to decode)" if prefill else ""
    return f"{workers} {'worker' if workers == 1 else 'workers'}{split}"


def plot_plan(inquiry: PlanRequest, known: Mapping[int, Sequence[LayoutOption]], path: Path) -> None:
    """Writes the figure. `known`: what was found at the bound that was asked for, by number of GPUs.

    Raises ConfigError as `plot_style.check_plot`.
    """
    plot_style.check_plot(path)
    traffic, targets = inquiry.traffic, inquiry.targets
    figure, axes = plot_style.panels(
        [f"{workers} GPUs (higher is better)" for workers in known],
        f"Simulated goodput, {traffic.input_len} tokens in, {traffic.output_len} out, "
        f"TTFT within {targets.ttft_s:g} s",
    )
    sweeps = [sweep(inquiry, workers, options) for workers, options in known.items()]
    top = 1.05 * max(y for curves in sweeps for points in curves.values() for _, y in points)
    for panel, curves in zip(axes, sweeps, strict=True):
        for look, points in zip(plot_style.LOOKS, curves.values(), strict=False):
            plot_style.draw(panel, look, [x for x, _ in points], [y for _, y in points])
        panel.set_xlabel("bound on the time per output token, ms", fontsize=9)
        panel.set_ylabel("requests per second and GPU", fontsize=9)
        panel.set_ylim(0, top or 1.0)  # one scale: goodput per GPU is compared between cluster sizes
    plot_style.legend(figure, [layout.value for layout in ClusterLayout])
    plot_style.save(figure, path)


def sweep(
    inquiry: PlanRequest, workers: int, known: Sequence[LayoutOption]
) -> dict[ClusterLayout, list[tuple[float, float]]]:
    """Points (bound in ms, goodput per GPU) of every layout, by rising bound."""
    targets = inquiry.targets
    by_bound = {targets.tpot_s: known}
    for bound in (factor * targets.tpot_s for factor in FACTORS):
        by_bound[bound] = layouts(replace(inquiry, targets=LatencyTargets(targets.ttft_s, bound)), workers)
    curves: dict[ClusterLayout, list[tuple[float, float]]] = {layout: [] for layout in ClusterLayout}
    for bound, options in sorted(by_bound.items()):
        for option in options:
            curves[option.layout].append((1e3 * bound, option.per_worker))
    return curves
