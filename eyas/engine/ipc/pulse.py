"""The pulse of an engine: a loop that takes long tells the front now and then that it goes on.

The computing code beats it: after a part of a layer, a sequence, a launch, a landing. So a slow but healthy
engine never looks like one that hangs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from eyas.engine.ipc.link import EngineLink
from eyas.engine.ipc.messages import EngineAlive

PULSE_S = 0.5  # from the beginning of a loop to its first message, and from one to the next

Beat = Callable[[], None]


class EngineHeartbeat:
    """The heartbeat, called as often as one likes by the engine's thread alone; silent before the
    first `loop`.
    """

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._due = math.inf

    def loop(self) -> None:
        """Starts the clock of a loop."""
        self._due = time.monotonic() + PULSE_S

    def __call__(self) -> None:
        """Sends a sign of life if one is due."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + PULSE_S
            self._link.send([EngineAlive()])


def no_pulse() -> None:
    """The beat of a process that no front watches."""
