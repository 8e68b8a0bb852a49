"""Is the engine alive? Alive is what makes progress: pure arithmetic on its stamps, no clock of its own."""

from __future__ import annotations

from eyas.engine.messages import Load

MIN_SILENCE_S = 3.0
STEPS_OF_SILENCE = 4.0


class Liveness:
    """Times are monotonic seconds, given by the caller. An engine without work is never stalled."""

    def __init__(self, now: float, slowest_step_s: float) -> None:
        self.limit_s = max(MIN_SILENCE_S, STEPS_OF_SILENCE * slowest_step_s)
        self._progress = -1
        self._pending = False
        self._since = now  # the last time it moved, or had nothing to do

    def sent(self, now: float) -> None:
        """A command went down: from here the engine owes progress."""
        if not self._pending:
            self._pending, self._since = True, now

    def saw(self, load: Load, now: float) -> None:
        if load.progress != self._progress or not load.pending:
            self._since = now
        self._progress, self._pending = load.progress, load.pending

    def stalled(self, now: float) -> bool:
        return self._pending and now - self._since > self.limit_s
