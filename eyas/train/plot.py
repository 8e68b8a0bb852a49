"""One figure of a head's training: loss, acceptance length and acceptance by depth over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.bench import plot_style

TITLES = (
    "Loss (lower is better)",
    "Acceptance length (higher is better)",
    "Acceptance by depth, held-out texts (higher is better)",
)

Line = Mapping[str, Any]


def plot_training(history: Sequence[Line], path: Path, heading: str) -> None:
    """Writes the figure of a run's measurements. Raises ConfigError as `plot_style.check_plot`."""
    plot_style.check_plot(path)
    measured = [line for line in history if "acceptance_length" in line]
    figure, axes = plot_style.panels(TITLES if measured else TITLES[:1], heading)
    steps = [line["step"] for line in history]
    plot_style.draw(axes[0], plot_style.LOOKS[0], steps, [line["loss"] for line in history])
    if measured:
        steps = [line["step"] for line in measured]
        plot_style.draw(axes[1], plot_style.LOOKS[0], steps, [line["acceptance_length"] for line in measured])
        depths = len(measured[-1]["acceptance_by_depth"])
        for depth, look in zip(range(depths), plot_style.LOOKS, strict=False):
            plot_style.draw(axes[2], look, steps, [line["acceptance_by_depth"][depth] for line in measured])
        axes[2].set_ylim(0, 1)
        plot_style.legend(
            figure, [f"depth {depth + 1}" for depth in range(min(depths, len(plot_style.LOOKS)))]
        )
    for panel in axes:
        panel.set_xlabel("steps", fontsize=9)
    plot_style.save(figure, path)
