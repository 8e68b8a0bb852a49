"""Chooses rates to load a server with, to find the highest one that it bears.

Rates are doubled until one is not borne; then the gap is halved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

START = 1.0  # requests per second
LOWEST, HIGHEST = 1 / 64, 4096.0
PRECISION = 1.1  # the knee is known when the lowest rate that was not borne is at most this times the highest


def next_rate(borne: Mapping[float, bool]) -> float | None:
    """The next rate to try, requests per second, given those that were tried; None: the knee is known."""
    if not borne:
        return START
    good, bad = knee(borne), _lowest_missed(borne)
    if good is None:
        return min(borne) / 2 if min(borne) > LOWEST else None
    if bad is None:
        return 2 * good if good < HIGHEST else None
    return _rounded(math.sqrt(good * bad)) if bad / good > PRECISION else None


def knee(borne: Mapping[float, bool]) -> float | None:
    """The highest rate below all that were not borne; None if there is none."""
    limit = _lowest_missed(borne) or math.inf
    return max((rate for rate, was in borne.items() if was and rate < limit), default=None)


def _lowest_missed(borne: Mapping[float, bool]) -> float | None:
    return min((rate for rate, was in borne.items() if not was), default=None)


def _rounded(rate: float) -> float:
    """Three digits, for people."""
    return float(f"{rate:.3g}")
