"""Is the engine alive? Alive is what makes progress: pure arithmetic on its stamps, no clock of its own."""

from __future__ import annotations

import math

from eyas.engine.ipc.messages import Load

MIN_SILENCE_S = 3.0
STEPS_OF_SILENCE = 4.0


class Liveness:
    """Times are monotonic seconds, given by the caller. An engine without work is never stalled.

    Work is what a `Load` calls pending, and every command that none has counted yet: a `Load` that left
    before a command came knows nothing of it. Nothing is expected before the engine is `loaded`.
    """

    def __init__(self) -> None:
        self.limit_s = math.inf
        self._progress = -1
        self._pending = False
        self._sent = 0  # commands, ever; and how many of them the engine has counted
        self._heard = 0
        self._since = 0.0  # the last time it moved, or had nothing to do

    def loaded(self, slowest_step_s: float, now: float) -> None:
        self.limit_s = max(MIN_SILENCE_S, STEPS_OF_SILENCE * slowest_step_s)
        self._since = now

    def sent(self, commands: int, now: float) -> None:
        """Commands went down: from here the engine owes progress."""
        if not self._owed:
            self._since = now
        self._sent += commands

    def saw(self, load: Load, now: float) -> None:
        moved = load.progress != self._progress
        self._progress, self._pending, self._heard = load.progress, load.pending, load.heard
        if moved or not self._owed:
            self._since = now

    def stalled(self, now: float) -> bool:
        return self._owed and now - self._since > self.limit_s

    @property
    def _owed(self) -> bool:
        return self._pending or self._heard < self._sent
