"""Predicts the end of the step in flight, so that the next is composed late, with all newcomers.

A step composed as soon as the one before has landed would keep every newcomer waiting for two whole steps.
What it expects is a guess: the loop also looks whether the step is over, else a step that was once seen to
end late would be waited for that long ever after.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

MARGIN_S = 0.0005


class StepClock:
    """Learns how long steps of a shape take, and how long it takes to compose one."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seconds: dict[Hashable, float] = {}
        self._composing_s = 0.0
        self._running: Hashable | None = None  # the shape of the step that the device works on
        self._since = 0.0

    def composed(self, began: float) -> None:
        """A step was composed and launched; that began at `began`."""
        self._composing_s = self._now() - began

    def ended(self) -> None:
        """The device has ended its step, as is seen just now."""
        if self._running is not None:
            took = self._now() - self._since
            self._seconds[self._running] = min(took, 1.05 * self._seconds.get(self._running, took))
        self._running = None

    def runs(self, shape: Hashable | None) -> None:
        """The device has ended a step by now, if there was one, and goes on with one of this shape."""
        self.ended()
        self._running, self._since = shape, self._now()

    @property
    def spare_s(self) -> float:
        """How long the next step need not be begun: 0 if that is not known. Whole milliseconds."""
        if self._running not in self._seconds:
            return 0.0
        end = self._since + self._seconds[self._running]
        spare = end - self._now() - 2 * self._composing_s - MARGIN_S
        return max(int(spare * 1000), 0) / 1000
