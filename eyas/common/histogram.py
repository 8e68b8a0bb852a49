"""Histograms with cumulative totals, and the bucket bounds that engines and fronts share."""

from __future__ import annotations

from bisect import bisect_left

STEP_SECONDS = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
"""Bounds for the time of an engine's step, from its launch until its tokens are available."""

STEP_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Bounds for the number of sequences in a step."""


class Histogram:
    """`counts[i]`: the values above bounds[i - 1] and up to bounds[i]; the last one: those above all bounds.

    `total`: the sum of all values.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Counts a value that occurred `times` times."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times
