"""Where the time of a start goes: seconds by phase, from the process's first instruction on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import psutil

SHOWN_S = 0.05  # less rounds to 0.0


class Phases:
    """A stopwatch for a start: `with phases("weights"): ...`; times of the same name add up.

    "import" is what passed from the start of this process until the stopwatch was made.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        """`now`: seconds on the clock that process start times are given in."""
        self._now = now
        self._began = psutil.Process().create_time()
        self._seconds = {"import": now() - self._began}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times a phase, also one that fails. Phases do not nest."""
        began = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - began

    def summary(self) -> str:
        """Such as "ready in 31.2 s: import 6.1, weights 4.2, other 0.9"; phases in the order they came in."""
        total = self._now() - self._began
        other = total - sum(self._seconds.values())
        phases = self._seconds | ({"other": other} if other >= SHOWN_S else {})
        return f"ready in {total:.1f} s: " + ", ".join(f"{name} {s:.1f}" for name, s in phases.items())
