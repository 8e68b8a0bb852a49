"""Ratios between two servers' latencies, with bootstrap confidence intervals.

Both answered the same requests, so requests are resampled in pairs; with repeated runs of a server, its runs
are resampled too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.bench.saved import Floats

SEED = 1
RESAMPLES = 4000
AT_ONCE = 1_000_000  # numbers in memory
FEWEST = 10  # requests on the far side of a percentile, for an interval
LEVEL = 0.95

Statistic = Callable[[Floats], Any]  # the last axis is the sample


@dataclass(frozen=True)
class RatioInterval:
    """`second` / `first` of one figure, and between which bounds it lies; None where requests are too few."""

    name: str
    first: float
    second: float
    bounds: tuple[float, float] | None

    @property
    def value(self) -> float:
        """The ratio."""
        return self.second / self.first if self.first else math.nan

    @property
    def differs(self) -> bool:
        """True if the interval leaves out 1."""
        return self.bounds is not None and not self.bounds[0] <= 1.0 <= self.bounds[1]


def mean(samples: Floats) -> Any:
    """The mean over the last axis."""
    return samples.mean(axis=-1)


def percentile(share: float) -> Statistic:
    """The percentile at `share` (0 to 1) over the last axis."""
    return lambda samples: np.quantile(samples, share, axis=-1)


def enough(requests: int, share: float) -> bool:
    """True if this number of requests tells something about the percentile at `share`."""
    return round(requests * (1 - share), 6) >= FEWEST  # 100 * (1 - 0.9) is a little below 10


def ratio(
    name: str, sides: tuple[Floats, Floats], statistic: Statistic, level: float | None
) -> RatioInterval:
    """The ratio of a statistic of two arrays [runs, requests] without NaN; a column is one request in both.

    `level`: of the interval; None: there is to be none. There is none either if the first may be 0.
    """
    first, second = (float(statistic(side.ravel())) for side in sides)
    if level is None or not first:
        return RatioInterval(name, first, second, None)
    ratios = np.concatenate(_resampled(sides, statistic, np.random.default_rng(SEED)))
    if not np.isfinite(ratios).all():
        return RatioInterval(name, first, second, None)
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return RatioInterval(name, first, second, (float(low), float(high)))


def _resampled(sides: tuple[Floats, Floats], statistic: Statistic, rng: np.random.Generator) -> list[Floats]:
    """RESAMPLES ratios in portions: requests drawn once for both sides, runs for each side."""
    requests = sides[0].shape[1]
    portion = max(1, AT_ONCE // max(side.size for side in sides))
    out = []
    for done in range(0, RESAMPLES, portion):
        count = min(portion, RESAMPLES - done)
        columns = rng.integers(requests, size=(count, 1, requests))
        values = []
        for side in sides:
            rows = rng.integers(len(side), size=(count, len(side), 1))
            values.append(statistic(side[rows, columns].reshape(count, -1)))
        with np.errstate(divide="ignore", invalid="ignore"):
            out.append(values[1] / values[0])
    return out
