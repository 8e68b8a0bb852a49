"""One figure of a head's training: loss, acceptance length and acceptance by depth over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.bench.plots import style

TITLES = (
    "Loss (lower is better)",
    "Acceptance length (higher is better)",
    "Acceptance by depth, held-out texts (higher is better)",
)

Line = Mapping[str, Any]


def plot_training(history: Sequence[Line], path: Path, heading: str) -> None:
    """Writes the figure of a run's measurements. Raises ConfigError as `style.check_plot`."""
    style.check_plot(path)
    measured = [line for line in history if "acceptance_length" in line]
    figure, axes = style.panels(TITLES if measured else TITLES[:1], heading)
    steps = [line["step"] for line in history]
    style.draw(axes[0], style.LOOKS[0], steps, [line["loss"] for line in history])
    if measured:
        steps = [line["step"] for line in measured]
        style.draw(axes[1], style.LOOKS[0], steps, [line["acceptance_length"] for line in measured])
        depths = len(measured[-1]["acceptance_by_depth"])
        for depth, look in zip(range(depths), style.LOOKS, strict=False):
            style.draw(axes[2], look, steps, [line["acceptance_by_depth"][depth] for line in measured])
        axes[2].set_ylim(0, 1)
        style.legend(figure, [f"depth {depth + 1}" for depth in range(min(depths, len(style.LOOKS)))])
    for panel in axes:
        panel.set_xlabel("steps", fontsize=9)
    style.save(figure, path)
