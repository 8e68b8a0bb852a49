"""The pace of steps, over what was measured at the start, by how many workers prefer prompts.

A table of step times is never right everywhere: it may hold for small batches and not for large ones. So what
is seen while k workers prefer prompts is believed of k, and of the numbers of which nothing is known yet.
"""

from __future__ import annotations

from eyas.common.step_pace import alike
from eyas.common.step_times import StepPace


class PaceMemory:
    """Keeps the last pace of each number: after a change that was wrong, what showed it is not forgotten."""

    def __init__(self) -> None:
        self._known: dict[int, StepPace] = {}

    def saw(self, prefilling: int, pace: StepPace) -> None:
        """The pace of now, while `prefilling` workers prefer prompts. Small differences count for nothing."""
        if not alike(pace, self.at(prefilling)):
            self._known[prefilling] = pace

    def at(self, prefilling: int) -> StepPace:
        """Returns the pace for that number, or for the nearest measured one; all 1.0 while none is."""
        nearest = min(self._known, key=lambda known: abs(known - prefilling), default=None)
        return StepPace() if nearest is None else self._known[nearest]
