"""Rank 0's executor over attention ranks: each does a step of one shape, with rows of its own.

What every rank is told may differ, what is launched may not: kernels of one rank wait for those of the
others. Whose rows they are it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from eyas.engine.device import calls
from eyas.engine.device.executor import Executor
from eyas.engine.device.lead import LedExecutor
from eyas.engine.device.step import Joined, StepInput


class LedRanks(LedExecutor):
    """A `LedExecutor` that begins with an input for each rank. `score` asks each for rows of the same places,
    and `finish` gives what all of them found (`DeviceState.told`).
    """

    def begin_each(self, steps: SequenceOf[StepInput]) -> None:
        """A step of each rank, rank 0's first: all of one shape, and scored or not together."""
        with self._lead.together():
            self._lead.tell_each([calls.begin(step) for step in steps[1:]])
            Executor.begin(self, steps[0])

    def join_each(self, joined: SequenceOf[Joined], writes: SequenceOf[np.ndarray]) -> None:
        """Sequences of each rank, as many of each; a head's passes over them wait for those of the others."""
        each = zip(joined[1:], writes[1:], strict=True)
        with self._lead.together():
            self._lead.tell_each([calls.join(*own) for own in each])
            Executor.join(self, joined[0], writes[0])

    def features_each(self, rows: SequenceOf[SequenceOf[int]]) -> torch.Tensor:
        """Of as many rows of each rank: float32 [ranks, n, head width]."""
        with self._lead.together():
            self._lead.tell_each([calls.features(each) for each in rows[1:]])
            return Executor.features(self, rows[0])

    def sample_each(self, rows: SequenceOf[np.ndarray]) -> list[torch.Tensor]:
        """Special rows of each rank, as many of each. Returns their reports [ranks, n, words], by slices."""
        with self._lead.together():
            self._lead.tell_each([calls.sample(each) for each in rows[1:]])
            return Executor.sample(self, rows[0])

    def copy_page_of(self, rank: int, source: int, target: int) -> None:
        """In that rank's pool, whose own numbers these are."""
        with self._lead.together():
            if rank:
                self._lead.tell_one(rank, calls.copy_page(source, target))
            else:
                Executor.copy_page(self, source, target)
