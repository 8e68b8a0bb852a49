"""Rank 0's side of an engine with several ranks: every call of its executor is made on all of them.

It knows what must happen everywhere and in which order, and that a device whose peer is gone waits for ever:
so each wait for it here looks after the followers too. What a step means it does not know.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import numpy as np
import torch

from eyas.common.errors import EngineError
from eyas.engine.batch.prompt_scores import Asked
from eyas.engine.device import calls
from eyas.engine.device.executor import Event, Executor
from eyas.engine.device.program import DeviceState
from eyas.engine.device.step import Joined, Late, StepInput
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import Channel, Followers, RankCall, RankInfo
from eyas.engine.sampling.scores import Scores

START_S = 120.0  # a follower's process may take so long to be there
LOAD_S = 900.0  # the slowest rank may load its weights so much longer than the fastest
STEP_S = 120.0  # a step may take so long, with kernels that it compiles
NAP_S = 50e-6  # between two looks at a device
LOST_S = 5.0  # after an exchange has failed, a rank that has ended is looked for so long
CHECK_S = 0.2  # between two looks after the followers meanwhile


class Lead:
    """Rank 0's hold on the others: `group`, in which it is one, and their processes, until `close`.

    `whole`: no follower has been lost.
    """

    def __init__(
        self, main: Callable[[RankInfo, Channel], None], ranks: int, device: str, meeting: Path
    ) -> None:
        """Starts them, each in `main`, and joins them by a new file `meeting`.

        Raises EngineError if one does not come.
        """
        self._followers = Followers(main, ranks, meeting)
        self.whole = True
        try:
            self._followers.wait_ready(START_S)
            self.group = ProcessGroup(self._followers.rank_info, device, LOAD_S, self._followers.check)
        except BaseException:
            self._followers.close()
            raise

    def tell(self, call: RankCall) -> None:
        """Every follower will do `call`. Raises EngineError if one is gone."""
        self._followers.broadcast(call)

    def tell_each(self, messages: SequenceOf[RankCall]) -> None:
        """Every follower will do its own, rank 1's first. Raises EngineError if one is gone."""
        for rank, call in enumerate(messages, start=1):
            self._followers.send(rank, call)

    def tell_one(self, rank: int, call: RankCall) -> None:
        """That follower will do `call`. Raises EngineError if it is gone."""
        self._followers.send(rank, call)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks are told and do. Raises EngineError, in plain words, if an exchange fails, or
        this rank's device. Whatever it raises, the others have begun what this rank has not done: nothing is
        done together any more.
        """
        try:
            yield
        except RuntimeError as error:
            self.whole = False
            deadline = time.monotonic() + LOST_S
            while time.monotonic() < deadline:
                self._followers.check()
                time.sleep(CHECK_S)
            raise EngineError(f"the ranks could not do a step together: {error}") from error
        except BaseException:
            self.whole = False
            raise

    def wait(self, event: torch.cuda.Event) -> None:
        """Until the device has passed `event`. Raises EngineError after STEP_S, or once a follower or the
        device is lost.
        """
        began = looked = time.monotonic()
        with self.together():
            while not event.query():
                time.sleep(NAP_S)
                now = time.monotonic()
                if now - looked > CHECK_S:
                    looked = now
                    self._followers.check()
                if now - began > STEP_S:
                    raise EngineError(f"the ranks have not done a step in {STEP_S:g} s")

    def close(self) -> None:
        """Parts from the followers; of a group that has lost one, nothing is waited for."""
        if self.whole:
            self._followers.dismiss()
            self.group.close()
        self._followers.close()


class LedExecutor(Executor):
    """Rank 0's executor: what it does, the followers' `Executor`s do."""

    def __init__(self, state: DeviceState, lead: Lead) -> None:
        super().__init__(state)
        self._lead = lead

    def begin(self, step: StepInput) -> None:
        with self._lead.together():
            self._lead.tell(calls.begin(step))
            super().begin(step)

    def score(self, asked: Asked) -> Scores:
        with self._lead.together():
            self._lead.tell(calls.score(asked))
            return super().score(asked)

    def join(self, joined: Joined, writes: np.ndarray) -> None:
        with self._lead.together():
            self._lead.tell(calls.join(joined, writes))
            super().join(joined, writes)

    def catch_up(self, late: Late) -> None:
        with self._lead.together():
            self._lead.tell(calls.catch_up(late))
            super().catch_up(late)

    def features(self, rows: SequenceOf[int]) -> torch.Tensor:
        with self._lead.together():
            self._lead.tell(calls.features(rows))
            return super().features(rows)

    def sample(self, rows: np.ndarray) -> list[torch.Tensor]:
        with self._lead.together():
            self._lead.tell(calls.sample(rows))
            return super().sample(rows)

    def finish(self, step: StepInput) -> tuple[torch.Tensor, Event | None]:
        with self._lead.together():
            self._lead.tell(calls.finish())
            return super().finish(step)

    def _event(self) -> Event | None:
        event = super()._event()
        return Watched(event, self._lead) if isinstance(event, torch.cuda.Event) else None

    def copy_page(self, source: int, target: int) -> None:
        with self._lead.together():
            self._lead.tell(calls.copy_page(source, target))
            super().copy_page(source, target)

    def wait(self) -> None:
        if self.state.device != "cpu":
            event = torch.cuda.Event()
            event.record()
            self._lead.wait(event)

    def close(self) -> bool:
        if self._lead.whole:  # else the device may hang, and nothing there is touched any more
            super().close()
        self._lead.close()
        return self._lead.whole


class Watched:
    """A device's event, waited for with an eye on the followers."""

    def __init__(self, event: torch.cuda.Event, lead: Lead) -> None:
        self._event = event
        self._lead = lead

    def synchronize(self) -> None:
        """Blocks until the device has passed it. Raises EngineError after STEP_S, or if a follower ends."""
        self._lead.wait(self._event)

    def query(self) -> bool:
        """Has the device passed it? A follower that has ended is noticed by `synchronize`."""
        with self._lead.together():
            return bool(self._event.query())
