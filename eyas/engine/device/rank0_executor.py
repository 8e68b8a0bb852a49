"""Rank 0's executor over several ranks: what it does, the followers' executors do too, in the same order.

Ranks that divide every layer are all told the same. Attention ranks have rows of their own, and may be told
different things, but what is launched is the same: kernels of one rank wait for those of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TypeVar

import numpy as np
import torch

from eyas.engine.batch.prompt_scores import ScoreRequest
from eyas.engine.device import calls
from eyas.engine.device.executor import DeviceEvent, StepExecutor
from eyas.engine.device.program import DeviceState
from eyas.engine.device.step import CatchUp, JoinBatch, RowMasks, StepInput
from eyas.engine.parallel.leader import RankLeader, WatchedEvent
from eyas.engine.parallel.ranks import RankCall
from eyas.engine.sampling.scores import TokenScores

Own = TypeVar("Own")


class Rank0Executor(StepExecutor):
    """The executor of attention rank 0, which sends every call to the others.

    A method that takes `others` takes there the input of each other rank, if there are some: as many
    sequences or rows, of steps of one shape.
    """

    def __init__(self, state: DeviceState, leader: RankLeader) -> None:
        super().__init__(state)
        self._leader = leader

    def begin(self, step: StepInput, *others: StepInput) -> None:
        with self._leader.together():
            self._tell(calls.begin, step, others)
            super().begin(step)

    def score(self, request: ScoreRequest) -> TokenScores:
        with self._leader.together():
            self._leader.tell(calls.score(request))
            return super().score(request)

    def join(self, joined: JoinBatch, *others: JoinBatch) -> None:
        with self._leader.together():
            self._tell(calls.join, joined, others)
            super().join(joined)

    def catch_up(self, batch: CatchUp) -> None:
        with self._leader.together():
            self._leader.tell(calls.catch_up(batch))
            super().catch_up(batch)

    def features(self, rows: SequenceOf[int], *others: SequenceOf[int]) -> torch.Tensor:
        with self._leader.together():
            self._tell(calls.features, rows, others)
            return super().features(rows)

    def mask(self, rows: RowMasks, *others: RowMasks) -> None:
        with self._leader.together():
            self._tell(calls.mask, rows, others)
            super().mask(rows)

    def sample(self, rows: np.ndarray, *others: np.ndarray) -> list[torch.Tensor]:
        with self._leader.together():
            self._tell(calls.sample, rows, others)
            return super().sample(rows)

    def finish(self, step: StepInput) -> tuple[torch.Tensor, DeviceEvent | None]:
        with self._leader.together():
            self._leader.tell(calls.finish())
            return super().finish(step)

    def copy_page(self, source: int, target: int, rank: int = 0) -> None:
        call = calls.copy_page(source, target)
        with self._leader.together():
            if rank:
                self._leader.tell_one(rank, call)
                return
            if self.state.sharers is None:
                self._leader.tell(call)
            super().copy_page(source, target)

    def copy_state(self, source: int, target: int) -> None:
        with self._leader.together():
            self._leader.tell(calls.copy_state(source, target))
            super().copy_state(source, target)

    def wait(self) -> None:
        if self.state.device != "cpu":
            event = torch.cuda.Event()
            event.record()
            self._leader.wait(event)

    def close(self) -> bool:
        if self._leader.whole:  # else the device may hang, and nothing there is touched any more
            super().close()
        self._leader.close()
        return self._leader.whole

    def _event(self) -> DeviceEvent | None:
        event = super()._event()
        return WatchedEvent(event, self._leader) if isinstance(event, torch.cuda.Event) else None

    def _tell(self, call: Callable[[Own], RankCall], own: Own, others: SequenceOf[Own]) -> None:
        if others:
            self._leader.tell_each([call(each) for each in others])
        else:
            self._leader.tell(call(own))
