"""Rank 0's executor over attention ranks: each does a step of one shape, with rows of its own.

What every rank is told may differ, what is launched may not: kernels of one rank wait for those of the
others. Whose rows they are it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from eyas.engine.batch.prompt_scores import Asked
from eyas.engine.device import calls
from eyas.engine.device.executor import Event, Executor
from eyas.engine.device.lead import LedExecutor
from eyas.engine.device.step import Joined, StepInput
from eyas.engine.sampling.scores import Scores


class LedRanks(LedExecutor):
    """A `LedExecutor` that begins with an input for each rank. `score` asks each for rows of the same places,
    and `finish` gives what all of them found (`DeviceState.told`).
    """

    def begin_each(self, steps: SequenceOf[StepInput]) -> None:
        """A step of each rank, rank 0's first: all of one shape, and scored or not together."""
        self._lead.tell_each([calls.begin(step) for step in steps[1:]])
        with self._lead.together():
            Executor.begin(self, steps[0])

    def join_each(self, joined: SequenceOf[Joined], writes: SequenceOf[np.ndarray]) -> None:
        """Sequences of each rank, as many of each; a head's passes over them wait for those of the others."""
        each = zip(joined[1:], writes[1:], strict=True)
        self._lead.tell_each([calls.join(*own) for own in each])
        with self._lead.together():
            Executor.join(self, joined[0], writes[0])

    def features_each(self, rows: SequenceOf[SequenceOf[int]]) -> torch.Tensor:
        """Of as many rows of each rank: float32 [ranks, n, head width]."""
        self._lead.tell_each([calls.features(each) for each in rows[1:]])
        with self._lead.together():
            return Executor.features(self, rows[0])

    def sample_each(self, rows: SequenceOf[np.ndarray]) -> list[torch.Tensor]:
        """Special rows of each rank, as many of each. Returns their reports [ranks, n, words], by slices."""
        self._lead.tell_each([calls.sample(each) for each in rows[1:]])
        with self._lead.together():
            return Executor.sample(self, rows[0])

    def score(self, asked: Asked) -> Scores:
        with self._lead.together():
            return super().score(asked)

    def finish(self, step: StepInput) -> tuple[torch.Tensor, Event | None]:
        with self._lead.together():
            return super().finish(step)

    def copy_page_of(self, rank: int, source: int, target: int) -> None:
        """In that rank's pool, whose own numbers these are."""
        if rank:
            self._lead.tell_one(rank, calls.copy_page(source, target))
        else:
            Executor.copy_page(self, source, target)
