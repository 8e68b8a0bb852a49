"""The curves of a plan: goodput per GPU over the bound on time per output token, a panel per cluster size.

It knows answers and how they are drawn; `eyas.planning.search` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from eyas.bench.plots import style
from eyas.planning.question import Question
from eyas.planning.search import Answer, layouts
from eyas.simulator.cluster import Layout
from gateway.placement import Targets

FACTORS = (0.5, 0.7, 1.4)
"""Bounds that are tried beside the one that was asked for, as factors of it."""


def plot_plan(question: Question, known: Mapping[int, Sequence[Answer]], path: Path) -> None:
    """Writes the figure. `known`: answers at the bound that was asked for, by number of GPUs.

    Raises ConfigError as `style.check_plot`.
    """
    style.check_plot(path)
    traffic, targets = question.traffic, question.targets
    figure, axes = style.panels(
        [f"{workers} GPUs (higher is better)" for workers in known],
        f"Simulated goodput, {traffic.input_len} tokens in, {traffic.output_len} out, "
        f"TTFT within {targets.ttft_s:g} s",
    )
    for panel, (workers, answers) in zip(axes, known.items(), strict=True):
        curves = sweep(question, workers, answers)
        for look, points in zip(style.LOOKS, curves.values(), strict=False):
            style.draw(panel, look, [x for x, _ in points], [y for _, y in points])
        panel.set_xlabel("bound on the time per output token, ms", fontsize=9)
        panel.set_ylabel("requests per second and GPU", fontsize=9)
        panel.set_ylim(bottom=0)
    style.legend(figure, [layout.value for layout in Layout])
    style.save(figure, path)


def sweep(
    question: Question, workers: int, known: Sequence[Answer]
) -> dict[Layout, list[tuple[float, float]]]:
    """Points (bound in ms, goodput per GPU) of every layout, by rising bound."""
    targets = question.targets
    found = {targets.tpot_s: known}
    for bound in (factor * targets.tpot_s for factor in FACTORS):
        found[bound] = layouts(replace(question, targets=Targets(targets.ttft_s, bound)), workers)
    curves: dict[Layout, list[tuple[float, float]]] = {layout: [] for layout in Layout}
    for bound, answers in sorted(found.items()):
        for answer in answers:
            curves[answer.layout].append((1e3 * bound, answer.per_worker))
    return curves
