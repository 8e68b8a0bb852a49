"""One figure of servers under rising load: throughput, goodput and latencies against the request rate.

It knows the figures of a run by their names, and refuses to know how rates were chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
LOG_FROM = 12.0


def plot_sweep(
    servers: Mapping[str, Sequence[Line]], bounds_ms: Mapping[str, float], path: Path, heading: str
) -> None:
    """Writes one figure of all servers. `bounds_ms`: of the SLO, by "ttft" and "tpot".

    Raises ConfigError as `style.check_plot` and `style.check_series`.
    """
    style.check_plot(path)
    style.check_series(len(servers))
    figure, axes = style.panels(TITLES, heading)
    _draw(axes[0], servers, "output_throughput")
    _draw(axes[1], servers, "goodput")
    rates = sorted({float(line["request_rate"]) for lines in servers.values() for line in lines})
    axes[1].plot(rates, rates, color=style.QUIET, linewidth=0.8)
    axes[1].set_ylabel("requests per second within the SLO\n(thin line: all that were sent)", fontsize=9)
    axes[0].set_ylabel("tokens per second", fontsize=9)
    for panel, name in ((axes[2], "ttft"), (axes[3], "tpot")):
        _draw(panel, servers, f"median_{name}_ms", f"p99_{name}_ms")
        panel.set_ylabel("ms (thin lines: 99th percentile)", fontsize=9)
        _log_if_wide(panel, servers, name)
        if bound := bounds_ms.get(name):
            panel.axhline(bound, color=style.QUIET, linewidth=1.2, linestyle=(0, (1, 3)))
            panel.annotate(f"SLO {bound:g} ms", (0.01, bound), xycoords=panel.get_yaxis_transform(), fontsize=8.5, va="bottom")
    for panel in axes:
        style.log_ticks(panel.xaxis)
        panel.set_xlabel("requests sent per second", fontsize=9)
    style.legend(figure, list(servers))
    style.save(figure, path)
