"""The curves of a plan: goodput per GPU over the bound on time per output token, a panel per cluster size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from eyas.bench import plot_style
from eyas.planning.inquiry import PlanRequest
from eyas.planning.search import LayoutOption, layouts
from eyas.simulator.cluster import ClusterLayout
from gateway.routing.placement import LatencyTargets

FACTORS = (0.5, 0.7, 1.4)
"""Bounds that are tried beside the requested one, as factors of it."""


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
