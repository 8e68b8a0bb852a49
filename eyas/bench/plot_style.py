"""The style of every figure: lines and markers that differ without colour, names at the lines, clear axes.

matplotlib is an extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from eyas.common.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
DPI = 130
PANEL_INCHES = (5.2, 3.3)
LABEL_HEIGHT = 0.06  # of a panel
LOG_FROM = 12.0
QUIET = "#8a8a8a"  # of what is not data


@dataclass(frozen=True)
class SeriesStyle:
    """The look of one series."""

    color: str
    dashes: Any  # a matplotlib line style
    marker: str


# From dark to light, so that the order stays when the colours go.
LOOKS = (
    SeriesStyle("#000000", "-", "o"),
    SeriesStyle("#b3362b", (0, (6, 2)), "s"),
    SeriesStyle("#2f6fb0", (0, (1.2, 1.4)), "^"),
    SeriesStyle("#d9822b", (0, (7, 2, 1.5, 2)), "D"),
    SeriesStyle("#5aa469", (0, (3, 1.5)), "v"),
    SeriesStyle("#a98bc4", (0, (5, 1.5, 1, 1.5, 1, 1.5)), "P"),
)


def check_plot(path: Path) -> None:
    """Raises ConfigError where no figure can be written: no matplotlib, or a suffix that is none of SUFFIXES.

    Commands call it before they measure.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot: {path} does not end in {' or '.join(SUFFIXES)}", param="plot")
    try:
        import matplotlib  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise ConfigError("--plot: needs matplotlib: pip install 'eyas[bench]'", param="plot") from error


def check_series(count: int) -> None:
    """Raises ConfigError for more series than can be told apart."""
    if count > len(LOOKS):
        raise ConfigError(
            f"--plot: {count} runs are too many for one figure: {len(LOOKS)} at most", param="plot"
        )


def panels(titles: Sequence[str], heading: str) -> tuple[Figure, list[Axes]]:
    """A figure with a panel per title, two in a row, under one heading."""
    from matplotlib.figure import Figure

    rows = (len(titles) + 1) // 2
    width, height = PANEL_INCHES
    figure = Figure(figsize=(2 * width, rows * height + 0.4), layout="constrained")
    figure.suptitle(heading, fontsize=11, x=0.01, ha="left")
    grid = figure.subplots(rows, 2, squeeze=False).flatten()
    for axes, title in zip(grid, titles, strict=False):
        axes.set_title(title, fontsize=10, loc="left", fontweight="bold")
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8.5)
    for axes in grid[len(titles) :]:
        axes.set_visible(False)
    return figure, list(grid[: len(titles)])


def log_scale(axes: Axes, which: Literal["x", "y"]) -> None:
    """A logarithmic axis whose ticks are plain numbers: 1, 2, 5, 10, ..."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def spread(values: npt.NDArray[np.float64]) -> float:
    """The 99th percentile over the 1st: from LOG_FROM on, an axis should be logarithmic; 0 if some are 0."""
    low, high = np.quantile(values, [0.01, 0.99])
    return float(high / low) if low > 0 else 0.0


def draw(axes: Axes, look: SeriesStyle, x: Any, y: Any, marks: Any = None) -> None:
    """One series; `marks`: the indices of the points that have a marker, or their distance (all of them)."""
    axes.plot(
        x,
        y,
        color=look.color,
        linestyle=look.dashes,
        linewidth=1.7,
        marker=look.marker,
        markersize=5,
        markevery=marks,
        markeredgecolor="white",
        markeredgewidth=0.5,
    )


def label(axes: Axes, text: str, point: tuple[float, float], *, left: bool = False) -> None:
    """A series' name beside one of its points, on white so that lines below do not cross it."""
    axes.annotate(
        text,
        point,
        xytext=(-7 if left else 7, 0),
        textcoords="offset points",
        ha="right" if left else "left",
        va="center",
        fontsize=8.5,
        bbox={"boxstyle": "square,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.9},
        annotation_clip=False,
        zorder=5,
    )


def label_ends(axes: Axes, ends: Sequence[tuple[str, tuple[float, float]]]) -> None:
    """The names of series on the right of their last points, moved apart where these are close.

    The axes' scales and all that they show must be there already.
    """
    axes.autoscale_view()
    scale = axes.transScale + axes.transLimits
    last = -1.0
    for name, point in sorted(ends, key=lambda end: end[1][1]):
        x, y = scale.transform(point)
        last = max(float(y), last + LABEL_HEIGHT)
        at = (float(x) + 0.02, last)
        axes.annotate(
            name, point, at, textcoords="axes fraction", va="center", fontsize=8.5, annotation_clip=False
        )


def legend(figure: Figure, names: Sequence[str]) -> None:
    """Name, line and marker of every series, once under all panels."""
    from matplotlib.lines import Line2D

    lines = [
        Line2D(
            [], [], color=look.color, linestyle=look.dashes, linewidth=1.7, marker=look.marker, markersize=5
        )
        for look, _ in zip(LOOKS, names, strict=False)
    ]
    figure.legend(
        lines,
        list(names),
        loc="outside lower left",
        ncols=4 if len(names) <= 4 else 3,
        fontsize=9,
        frameon=False,
        handlelength=4.5,
    )


def save(figure: Figure, path: Path) -> None:
    """Writes PNG or SVG, by the suffix; makes the folder. An SVG's words stay words, and it has no date."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    svg = path.suffix.lower() == ".svg"
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(path, dpi=DPI, metadata={"Date": None} if svg else None)
