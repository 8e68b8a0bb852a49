"""Compares the steps that landed with the table that the engine measured at its start.

Routers decide what follows from the difference.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from eyas.common.step_times import PaceMeter, StepPace, StepTimes
from eyas.engine.batch.sequence import SequenceWork


class StepPaces:
    """The step paces of one engine. A step takes one look at each of its works."""

    def __init__(self, times: StepTimes) -> None:
        """`times`: as measured at the start."""
        self._times = times
        self._meter = PaceMeter()

    def landed(self, works: SequenceOf[SequenceWork], seconds: float) -> None:
        """A step took `seconds` from its launch, or from the landing of the one before if that came later."""
        decoding = context = rows = 0
        pairs = 0.0
        for work in works:
            if work.round:
                decoding += 1
                context += work.start + 1
            else:
                count = len(work.tokens)
                rows += count
                pairs += count * (work.start + count / 2)
        self._meter.ran(decoding, rows, seconds, self._times.step_s(decoding, context, rows, pairs))

    @property
    def pace(self) -> StepPace:
        """The pace by kind of step; 0.0 for one that it has not seen."""
        return self._meter.pace
