"""The curves of a plan: goodput per GPU over the bound on time per output token, a panel per cluster size.

It knows answers and how they are drawn; `eyas.planning.search` makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eyas.bench.plots import style
from eyas.planning.question import Question
from eyas.planning.search import layouts
from eyas.simulator.cluster import Layout
from gateway.placement import Targets

FACTORS = (0.5, 0.65, 0.8, 1.0, 1.4)
"""Bounds that are tried, as factors of the bound that was asked for."""


def plot_plan(question: Question, gpus: Sequence[int], path: Path) -> None:
    """Writes the figure. Raises ConfigError as `style.check_plot`."""
    style.check_plot(path)
    traffic, targets = question.traffic, question.targets
    figure, axes = style.panels(
        [f"{workers} GPUs (higher is better)" for workers in gpus],
        f"Simulated goodput, {traffic.input_len} tokens in, {traffic.output_len} out, "
        f"TTFT within {targets.ttft_s:g} s",
    )
    for panel, workers in zip(axes, gpus, strict=True):
        curves = sweep(question, workers)
        for look, points in zip(style.LOOKS, curves.values(), strict=False):
            style.draw(panel, look, [x for x, _ in points], [y for _, y in points])
        panel.set_xlabel("bound on the time per output token, ms", fontsize=9)
        panel.set_ylabel("requests per second and GPU", fontsize=9)
        panel.set_ylim(bottom=0)
    style.legend(figure, [layout.value for layout in Layout])
    style.save(figure, path)


def sweep(question: Question, workers: int) -> dict[Layout, list[tuple[float, float]]]:
    """Points (bound in ms, goodput per GPU) of every layout."""
    curves: dict[Layout, list[tuple[float, float]]] = {layout: [] for layout in Layout}
    for factor in FACTORS:
        bound = question.targets.tpot_s * factor
        targets = Targets(question.targets.ttft_s, bound)
        for answer in layouts(replace(question, targets=targets), workers):
            curves[answer.layout].append((1e3 * bound, answer.per_worker))
    return curves
