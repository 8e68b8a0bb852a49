"""One figure of servers under rising load: throughput, goodput and latencies against the request rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.bench.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = Mapping[str, Any]  # the figures of one run
TITLES = (
    "Output tokens per second (higher is better)",
    "Goodput (higher is better)",
    "Time to first token (lower is better)",
    "Time per output token (lower is better)",
)


def plot_sweep(
    servers: Mapping[str, Sequence[Line]], bounds_ms: Mapping[str, float], path: Path, heading: str
) -> None:
    """Writes one figure of all servers. `bounds_ms`: those of the SLO, by "ttft" and "tpot".

    Raises ConfigError as `style.check_plot` and `style.check_series`.
    """
    style.check_plot(path)
    style.check_series(len(servers))
    figure, axes = style.panels(TITLES, heading)
    ordered = {name: sorted(lines, key=_rate) for name, lines in servers.items() if lines}
    rates = sorted({_rate(line) for lines in ordered.values() for line in lines})
    axes[1].plot(rates, rates, color=style.QUIET, linewidth=0.8)
    _lines(axes[0], ordered, "output_throughput", "tokens per second")
    _lines(axes[1], ordered, "goodput", "requests per second within the SLO\n(thin line: all that were sent)")
    for panel, name in zip(axes[2:], ("ttft", "tpot"), strict=True):
        for look, lines in zip(style.LOOKS, ordered.values(), strict=False):
            x, y = _points(lines, f"p99_{name}_ms")
            panel.plot(x, y, color=look.color, linestyle=look.dashes, linewidth=0.8)
        if name in bounds_ms:
            _bound(panel, bounds_ms[name])
        _lines(panel, ordered, f"median_{name}_ms", "ms: median (thin line: 99th percentile)")
    style.legend(figure, list(ordered))
    style.save(figure, path)


def _rate(line: Line) -> float:
    return float(line["request_rate"])


def _points(lines: Sequence[Line], figure: str) -> tuple[list[float], list[float]]:
    """Rates and values; a run without a success has none."""
    known = [line for line in lines if line[figure] is not None]
    return [_rate(line) for line in known], [float(line[figure]) for line in known]


def _lines(axes: Axes, servers: Mapping[str, Sequence[Line]], figure: str, unit: str) -> None:
    """One line per server, with its name at its last point."""
    points = {name: _points(lines, figure) for name, lines in servers.items()}
    for look, (x, y) in zip(style.LOOKS, points.values(), strict=False):
        style.draw(axes, look, x, y)
    style.log_scale(axes, "x")
    values = [value for _, y in points.values() for value in y]
    if figure.endswith("_ms") and values and style.spread(np.array(values)) > style.LOG_FROM:
        style.log_scale(axes, "y")
    style.label_ends(axes, [(name, (x[-1], y[-1])) for name, (x, y) in points.items() if x])
    axes.set_xlabel("requests sent per second", fontsize=9)
    axes.set_ylabel(unit, fontsize=9)


def _bound(axes: Axes, bound_ms: float) -> None:
    axes.axhline(bound_ms, color=style.QUIET, linewidth=1.2, linestyle=(0, (1, 2)))
    axes.annotate(
        f"SLO: {bound_ms:g} ms",
        (0.01, bound_ms),
        xycoords=axes.get_yaxis_transform(),
        fontsize=8.5,
        va="bottom",
    )
