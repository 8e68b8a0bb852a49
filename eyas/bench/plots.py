"""Figures of measurements, readable without colours and without the text around them.

* Of runs: how latency is distributed, and how many tokens came at which time.
* Of a grid of speculation: throughput, gain, acceptance over the batch, for the best ones.
* Of servers under rising load: throughput, goodput and latencies against the request rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.bench import plot_style
from eyas.bench.saved import Floats, SavedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = 5  # markers per line
BUCKETS = 40
WIDTHS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
RUN_TITLES = (
    "Time to first token (further left is better)",
    "Time per output token (further left is better)",
    "End-to-end latency (further left is better)",
    "Output tokens over time",
)
Line = Mapping[str, Any]
PANELS = {
    "output_throughput": ("Output tokens per second (higher is better)", "tokens per second"),
    "speedup": ("Against no drafts (higher is better)", "times the throughput without drafts"),
    "accept_length": ("Acceptance length (higher is better)", "tokens per request and round"),
}
RunFigures = Mapping[str, Any]  # the figures of one run
SWEEP_TITLES = (
    "Output tokens per second (higher is better)",
    "Goodput (higher is better)",
    "Time to first token (lower is better)",
    "Time per output token (lower is better)",
)


def plot_runs(runs: Sequence[SavedRun], path: Path, heading: str) -> None:
    """Writes latency CDFs (TTFT, TPOT, end to end) and throughput over time of at most six runs.

    Raises ConfigError as `plot_style.check_plot` and `plot_style.check_series`.
    """
    plot_style.check_plot(path)
    plot_style.check_series(len(runs))
    timed = all(run.starts_s is not None for run in runs)
    figure, axes = plot_style.panels(RUN_TITLES if timed else RUN_TITLES[:3], heading)
    _distributions(axes[0], runs, [1e3 * run.ttfts_s for run in runs], "ms")
    _distributions(axes[1], runs, [1e3 * run.tpots_s for run in runs], "ms per token")
    _distributions(axes[2], runs, [run.latencies_s for run in runs], "s")
    if timed:
        _over_time(axes[3], runs)
    plot_style.legend(figure, [f"{run.name} ({run.requests - run.failed} requests)" for run in runs])
    plot_style.save(figure, path)


def _distributions(axes: Axes, runs: Sequence[SavedRun], times: Sequence[Floats], unit: str) -> None:
    """One CDF per run that has such times."""
    known = [(i, np.sort(values[~np.isnan(values)])) for i, values in enumerate(times)]
    lines = [(i, values) for i, values in known if len(values)]
    for i, values in lines:
        marks = np.unique(np.linspace(0, len(values) - 1, MARKS).astype(int)).tolist()
        plot_style.draw(axes, plot_style.LOOKS[i], values, _shares(values), marks)
    if lines and plot_style.spread(np.concatenate([values for _, values in lines])) > plot_style.LOG_FROM:
        plot_style.log_scale(axes, "x")
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
        axes.plot(x, [height] * 2, color=plot_style.QUIET, linewidth=0.7)
        plot_style.label(axes, name, (x[0], height), left=left)


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
        plot_style.draw(axes, plot_style.LOOKS[i], middles, rates, max(1, len(rates) // MARKS))
        at = int((i + 0.5) / len(runs) * len(rates))
        plot_style.label(axes, run.name, (float(middles[at]), float(rates[at])))
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"seconds since the run's start, in steps of {width:g} s", fontsize=9)
    axes.set_ylabel("output tokens per second", fontsize=9)


def plot_speculative(lines: Sequence[Line], path: Path, heading: str) -> None:
    """Writes the figure. Of more settings than can be told apart, those with the largest gains are shown.

    Raises ConfigError as `plot_style.check_plot`.
    """
    plot_style.check_plot(path)
    shown = _largest(lines)
    figure, axes = plot_style.panels([title for title, _ in PANELS.values()], heading)
    for panel, (name, (_, unit)) in zip(axes, PANELS.items(), strict=True):
        for look, points in zip(plot_style.LOOKS, shown.values(), strict=False):
            plot_style.draw(
                panel, look, [line["batch_size"] for line in points], [line[name] for line in points]
            )
        plot_style.log_scale(panel, "x")
        panel.set_ylim(bottom=0)
        panel.set_xlabel("requests at a time", fontsize=9)
        panel.set_ylabel(unit, fontsize=9)
    plot_style.legend(figure, list(shown))
    plot_style.save(figure, path)


def _largest(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """The lines of each setting by rising batch: the first setting, and those with the largest gain."""
    by_setting: dict[str, list[Line]] = {}
    for line in sorted(lines, key=lambda one: int(one["batch_size"])):
        by_setting.setdefault(line["setting"], []).append(line)
    first, *others = by_setting
    others.sort(key=lambda name: -max(line["speedup"] for line in by_setting[name]))
    return {name: by_setting[name] for name in [first, *others[: len(plot_style.LOOKS) - 1]]}


def plot_sweep(
    servers: Mapping[str, Sequence[RunFigures]], bounds_ms: Mapping[str, float], path: Path, heading: str
) -> None:
    """Writes one figure of all servers. `bounds_ms`: those of the SLO, by "ttft" and "tpot".

    Raises ConfigError as `plot_style.check_plot` and `plot_style.check_series`.
    """
    plot_style.check_plot(path)
    plot_style.check_series(len(servers))
    figure, axes = plot_style.panels(SWEEP_TITLES, heading)
    ordered = {name: sorted(lines, key=_rate) for name, lines in servers.items() if lines}
    rates = sorted({_rate(line) for lines in ordered.values() for line in lines})
    axes[1].plot(rates, rates, color=plot_style.QUIET, linewidth=0.8)
    _load_lines(axes[0], ordered, "output_throughput", "tokens per second")
    _load_lines(
        axes[1], ordered, "goodput", "requests per second within the SLO\n(thin line: all that were sent)"
    )
    for panel, name in zip(axes[2:], ("ttft", "tpot"), strict=True):
        for look, lines in zip(plot_style.LOOKS, ordered.values(), strict=False):
            x, y = _points(lines, f"p99_{name}_ms")
            panel.plot(x, y, color=look.color, linestyle=look.dashes, linewidth=0.8)
        if name in bounds_ms:
            _bound(panel, bounds_ms[name])
        _load_lines(panel, ordered, f"median_{name}_ms", "ms: median (thin line: 99th percentile)")
    plot_style.legend(figure, list(ordered))
    plot_style.save(figure, path)


def _rate(line: RunFigures) -> float:
    return float(line["request_rate"])


def _points(lines: Sequence[RunFigures], figure: str) -> tuple[list[float], list[float]]:
    """Rates and values; a run without a success has none."""
    known = [line for line in lines if line[figure] is not None]
    return [_rate(line) for line in known], [float(line[figure]) for line in known]


def _load_lines(axes: Axes, servers: Mapping[str, Sequence[RunFigures]], figure: str, unit: str) -> None:
    """One line per server, with its name at its last point."""
    points = {name: _points(lines, figure) for name, lines in servers.items()}
    for look, (x, y) in zip(plot_style.LOOKS, points.values(), strict=False):
        plot_style.draw(axes, look, x, y)
    plot_style.log_scale(axes, "x")
    values = [value for _, y in points.values() for value in y]
    if figure.endswith("_ms") and values and plot_style.spread(np.array(values)) > plot_style.LOG_FROM:
        plot_style.log_scale(axes, "y")
    plot_style.label_ends(axes, [(name, (x[-1], y[-1])) for name, (x, y) in points.items() if x])
    axes.set_xlabel("requests sent per second", fontsize=9)
    axes.set_ylabel(unit, fontsize=9)


def _bound(axes: Axes, bound_ms: float) -> None:
    axes.axhline(bound_ms, color=plot_style.QUIET, linewidth=1.2, linestyle=(0, (1, 2)))
    axes.annotate(
        f"SLO: {bound_ms:g} ms",
        (0.01, bound_ms),
        xycoords=axes.get_yaxis_transform(),
        fontsize=8.5,
        va="bottom",
    )
