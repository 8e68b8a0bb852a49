"""Bounds a step's wait for drafts by what running acceptance says a proposal is worth.

A proposal that arrives saves `gain` plain steps, so waiting pays up to gain x the step's time; beyond that
the step goes plainly and the late proposal is trimmed when it comes.
"""

from __future__ import annotations

from collections.abc import Sequence

from eyas.engine.batch.step_result import StepResult

SMOOTHING = 0.1
GAIN = 1.0  # accepted drafts per proposal, before one has been seen
MOST_STEPS = 2.0  # however good the drafter was: a dead one must not cost more than this, 8 times
RECOVERY = 0.01
"""How far a low gain goes back to `GAIN` per step whose mailboxes held nothing. Where a wait is too short for
any proposal to come in time, no step would show that proposals have become worth more.
"""


class DraftWait:
    """Running averages of the time of a step and of the time that a proposal saves."""

    def __init__(self) -> None:
        self._gain = GAIN
        self._step_s = 0.0

    @property
    def draft_wait_s(self) -> float:
        """Seconds that a step may wait for a proposal; 0.0 before the first step."""
        return min(self._gain, MOST_STEPS) * self._step_s

    def stepped(self, landed: Sequence[StepResult], seconds: float) -> None:
        """Learn from a step without prompt chunks.

        One that waited in vain on the device says nothing of a step's time, or waiting would breed waiting.
        Those of its proposals that did come say what they were worth.
        """
        if any(one.work.tree is None and len(one.work.tokens) > 1 for one in landed):
            return
        in_vain = any(one.work.seq.mailed and not one.drafts.offered for one in landed)
        if not (self._step_s and in_vain):
            self._step_s += (seconds - self._step_s) * (SMOOTHING if self._step_s else 1.0)
        verified = [one for one in landed if one.drafts.offered]
        if verified:
            accepted = sum(one.drafts.accepted for one in verified) / len(verified)
            self._gain += (accepted - self._gain) * SMOOTHING
        elif in_vain:
            self._gain += max(GAIN - self._gain, 0.0) * RECOVERY
