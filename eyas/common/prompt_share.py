"""The part of an engine's last seconds that went to steps with prompts: a mean that fades."""

from __future__ import annotations

import math

WINDOW_S = 4.0
"""After this time, what was measured has lost all but 1/e of its weight."""


class PromptShare:
    """Told of every step, in order. Times are seconds of one clock; time without steps counts as none."""

    def __init__(self) -> None:
        self._share = 0.0
        self._end_s = -math.inf

    def ran(self, start_s: float, end_s: float, *, prompts: bool) -> None:
        """A step ran; `prompts`: it computed prompt rows. What an earlier step overlaps counts as that's."""
        start_s = max(start_s, self._end_s)
        end_s = max(start_s, end_s)
        decay = math.exp(-(end_s - start_s) / WINDOW_S)
        self._share = decay * self.at(start_s) + (1.0 - decay if prompts else 0.0)
        self._end_s = end_s

    def at(self, now_s: float) -> float:
        """The share, from 0 to 1."""
        return self._share and self._share * math.exp(-(now_s - self._end_s) / WINDOW_S)
