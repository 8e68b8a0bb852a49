"""One figure of runs: how latency is distributed, and how many tokens came at which time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eyas.bench.plots import style
from eyas.bench.saved import Floats, SavedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = 5  # markers per line
BUCKETS = 40
WIDTHS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
TITLES = (
    "Time to first token (further left is better)",
    "Time per output token (further left is better)",
    "End-to-end latency (further left is better)",
    "Output tokens over time",
)


def plot_runs(runs: Sequence[SavedRun], path: Path, heading: str) -> None:
    """Writes latency CDFs (TTFT, TPOT, end to end) and throughput over time of at most six runs.

    Raises ConfigError as `style.check_plot` and `style.check_series`.
    """
    style.check_plot(path)
    style.check_series(len(runs))
    timed = all(run.starts_s is not None for run in runs)
    figure, axes = style.panels(TITLES if timed else TITLES[:3], heading)
    _distributions(axes[0], runs, [1e3 * run.ttfts_s for run in runs], "ms")
    _distributions(axes[1], runs, [1e3 * run.tpots_s for run in runs], "ms per token")
    _distributions(axes[2], runs, [run.latencies_s for run in runs], "s")
    if timed:
        _over_time(axes[3], runs)
    style.legend(figure, [f"{run.name} ({run.requests - run.failed} requests)" for run in runs])
    style.save(figure, path)


def _distributions(axes: Axes, runs: Sequence[SavedRun], times: Sequence[Floats], unit: str) -> None:
    """One CDF per run that has such times."""
    known = [(i, np.sort(values[~np.isnan(values)])) for i, values in enumerate(times)]
    lines = [(i, values) for i, values in known if len(values)]
    for i, values in lines:
        marks = np.unique(np.linspace(0, len(values) - 1, MARKS).astype(int)).tolist()
        style.draw(axes, style.LOOKS[i], values, _shares(values), marks)
    if lines and style.spread(np.concatenate([values for _, values in lines])) > style.LOG_FROM:
        style.log_scale(axes, "x")
    else:
        axes.set_xlim(left=0)
    _name_lines(axes, [(runs[i].name, values) for i, values in lines])
    axes.set_ylim(0, 101)
    axes.set_yticks([0, 25, 50, 75, 90, 99])
    axes.set_xlabel(unit, fontsize=9)
    axes.set_ylabel("% of requests that took at most this", fontsize=9)


def _shares(values: Floats) -> Floats:
    """The share of the sorted values that are at most as large as each, in percent."""
    return 100 * np.arange(1, len(values) + 1) / len(values)


def _name_lines(axes: Axes, lines: list[tuple[str, Floats]]) -> None:
    """Each name stands beside its line: faster ones high on the left, slower ones low on the right.

    A CDF leaves these corners free. Where other lines are too close, a thin line leads past them; where the
    panel ends, the name stands on the other side.
    """
    ordered = sorted(lines, key=lambda line: float(np.median(line[1])))
    scale = axes.transScale + axes.transLimits
    for rank, (name, values) in enumerate(ordered):
        height = 100 * (1 - (rank + 0.5) / len(ordered))
        own, *others = (
            float(scale.transform((np.interp(height, _shares(line), line), 1))[0])
            for line in (values, *(line for _, line in lines))
        )
        width = 0.04 + 0.017 * len(name)  # of the panel's
        left = rank < len(ordered) / 2
        place = _free_place(own, others, width, left)
        if place < width if left else place > 1 - width:
            left = not left
            place = _free_place(own, others, width, left)
        x = [float(scale.inverted().transform((share, 0))[0]) for share in (place, own)]
        axes.plot(x, [height] * 2, color=style.QUIET, linewidth=0.7)
        style.label(axes, name, (x[0], height), left=left)


def _free_place(own: float, others: list[float], width: float, left: bool) -> float:
    """The first place from `own` outwards that has room for a name before the next of `others`.

    All are shares of the panel's width.
    """
    place = own
    for x in sorted((x for x in others if (x < own if left else x > own)), reverse=left):
        if abs(x - place) > width:
            break
        place = x
    return place


def _over_time(axes: Axes, runs: Sequence[SavedRun]) -> None:
    longest = max(float(run.figures["duration"]) for run in runs)
    width = next((w for w in WIDTHS_S if longest / w <= BUCKETS), WIDTHS_S[-1])
    for i, run in enumerate(runs):
        rates = run.tokens_per_second(width)
        middles = (np.arange(len(rates)) + 0.5) * width
        style.draw(axes, style.LOOKS[i], middles, rates, max(1, len(rates) // MARKS))
        at = int((i + 0.5) / len(runs) * len(rates))
        style.label(axes, run.name, (float(middles[at]), float(rates[at])))
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"seconds since the run's start, in steps of {width:g} s", fontsize=9)
    axes.set_ylabel("output tokens per second", fontsize=9)
