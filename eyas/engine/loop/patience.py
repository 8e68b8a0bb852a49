"""How long a step may wait for drafts: what running acceptance says a proposal is worth, and no more.

A proposal that arrives saves `gain` plain steps, so waiting pays up to gain x the step's time; beyond that
the step goes plainly and the late proposal is trimmed when it comes.
"""

from __future__ import annotations

from collections.abc import Sequence

from eyas.engine.batch.landed import Landed

SMOOTHING = 0.1
MOST_STEPS = 2.0  # however good the drafter was: a dead one must not cost more than this, 8 times


class Patience:
    def __init__(self) -> None:
        self._gain = 1.0  # accepted drafts a verify row
        self._step_s = 0.0

    @property
    def draft_wait_s(self) -> float:
        return min(self._gain, MOST_STEPS) * self._step_s

    def stepped(self, landed: Sequence[Landed], seconds: float) -> None:
        """Learn from a step without prompt chunks."""
        if any(one.work.tree is None and len(one.work.tokens) > 1 for one in landed):
            return
        self._step_s += (seconds - self._step_s) * (SMOOTHING if self._step_s else 1.0)
        verified = [one for one in landed if one.work.tree is not None]
        if verified:
            accepted = sum(one.drafts.accepted for one in verified) / len(verified)
            self._gain += (accepted - self._gain) * SMOOTHING
