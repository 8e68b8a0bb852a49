"""The liveness of the engine, which means that it makes progress: arithmetic on its stamps, no clock.

A pulse within a step is progress as the end of a step is: how long a step takes says nothing. A silence has
two bounds. Past the first the engine is late: nothing new is to wait for it, and what it has stays. Past the
second, several times as long, it stalls: what it has goes elsewhere.
"""

from __future__ import annotations

import math

from eyas.engine.ipc.messages import EngineLoad

MIN_SILENCE_S = 3.0
STEPS_OF_SILENCE = 4.0
STALL = 4.0  # times the first bound


class EngineLiveness:
    """The engine's last progress. The caller gives the times, in monotonic seconds.

    An engine without work is never late. It has work while its last `EngineLoad` says `pending`, and while
    that has not counted every command sent: an `EngineLoad` may have left before a command arrived. Nothing
    is expected before `loaded` is called.
    """

    def __init__(self) -> None:
        self.limit_s = math.inf
        self._progress = -1
        self._pending = False
        self._sent = 0  # commands sent so far
        self._heard = 0  # commands that the engine has counted
        self._since = 0.0  # when it last made progress or had no work

    @property
    def stall_s(self) -> float:
        """The second bound."""
        return STALL * self.limit_s

    def loaded(self, slowest_step_s: float, now: float) -> None:
        """The engine is loaded: from now on it may be silent for a few of its slowest steps."""
        self.limit_s = max(MIN_SILENCE_S, STEPS_OF_SILENCE * slowest_step_s)
        self._since = now

    def sent(self, commands: int, now: float) -> None:
        """`commands` commands were sent: from now on the engine must make progress."""
        if not self._owed:
            self._since = now
        self._sent += commands

    def saw(self, load: EngineLoad, now: float) -> None:
        """A `EngineLoad` arrived."""
        moved = load.progress != self._progress
        self._progress, self._pending, self._heard = load.progress, load.pending, load.heard
        if moved or not self._owed:
            self._since = now

    def beat(self, now: float) -> None:
        """A pulse arrived."""
        self._since = now

    def missed(self, seconds: float) -> None:
        """The caller itself did not run for so long: that counts for nobody's silence."""
        self._since += seconds

    def is_lagging(self, now: float) -> bool:
        """Whether the engine has had work without progress for longer than `limit_s`."""
        return self._owed and now - self._since > self.limit_s

    def stalled(self, now: float) -> bool:
        """Whether that has lasted longer than `stall_s`."""
        return self._owed and now - self._since > self.stall_s

    @property
    def _owed(self) -> bool:
        return self._pending or self._heard < self._sent
