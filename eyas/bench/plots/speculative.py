"""One figure of a grid of speculation: throughput, gain, acceptance over the batch, for the best ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.bench.plots import style

Line = Mapping[str, Any]
PANELS = {
    "output_throughput": ("Output tokens per second (higher is better)", "tokens per second"),
    "speedup": ("Against no drafts (higher is better)", "times the throughput without drafts"),
    "accept_length": ("Acceptance length (higher is better)", "tokens per request and round"),
}


def plot_speculative(lines: Sequence[Line], path: Path, heading: str) -> None:
    """Writes the figure. Of more settings than can be told apart, those with the largest gains are shown.

    Raises ConfigError as `style.check_plot`.
    """
    style.check_plot(path)
    shown = _largest(lines)
    figure, axes = style.panels([title for title, _ in PANELS.values()], heading)
    for panel, (name, (_, unit)) in zip(axes, PANELS.items(), strict=True):
        for look, points in zip(style.LOOKS, shown.values(), strict=False):
            style.draw(panel, look, [line["batch_size"] for line in points], [line[name] for line in points])
        style.log_scale(panel, "x")
        panel.set_ylim(bottom=0)
        panel.set_xlabel("requests at a time", fontsize=9)
        panel.set_ylabel(unit, fontsize=9)
    style.legend(figure, list(shown))
    style.save(figure, path)


def _largest(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """The lines of each setting by rising batch: the first setting, and those with the largest gain."""
    by_setting: dict[str, list[Line]] = {}
    for line in sorted(lines, key=lambda one: int(one["batch_size"])):
        by_setting.setdefault(line["setting"], []).append(line)
    first, *others = by_setting
    others.sort(key=lambda name: -max(line["speedup"] for line in by_setting[name]))
    return {name: by_setting[name] for name in [first, *others[: len(style.LOOKS) - 1]]}
