"""Rank 0's side of an engine with several ranks: it starts the others, meets them, and tells them what to do.

A device whose peer is gone waits for ever: so each wait for it here looks after the followers too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import torch

from eyas.common.errors import EngineError
from eyas.engine.ipc.pulse import Beat, no_pulse
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import FollowerMain, RankCall, RankChannel, RankFollowers, RankInfo

JOIN = "join the group"
START_S = 120.0  # a follower's process may take so long to be there
LOAD_S = 900.0  # the slowest rank may load its weights so much longer than the fastest
STEP_S = 120.0  # a step may take so long, with kernels that it compiles
NAP_S = 50e-6  # between two looks at a device
LOST_S = 5.0  # after an exchange has failed, a rank that has ended is looked for so long
CHECK_S = 0.2  # between two looks after the followers meanwhile


class RankLeader:
    """Rank 0's hold on the others, from their start until `close`. `group`: of all, once they have met.

    `whole`: no follower has been lost.
    """

    group: ProcessGroup

    def __init__(self, main: FollowerMain, ranks: int, meeting: Path) -> None:
        """Starts them, each in `main`, where it calls `join_leader`. `meeting`: a new file."""
        self._followers = RankFollowers(main, ranks, meeting)
        self.rank_info = self._followers.rank_info
        self.whole = True

    def meet(self, device: str, ready_s: float, wait_s: float) -> None:
        """Waits for all, at most `ready_s`, and joins them in a group whose waits last `wait_s` at most.

        Raises EngineError, and ends them, if one does not come.
        """
        try:
            self._followers.wait_ready(ready_s)
            self.tell(RankCall(JOIN))
            self.group = ProcessGroup(self.rank_info, device, wait_s, self._followers.check)
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """Ends the other ranks at once, without waiting for an answer."""
        self.whole = False
        self._followers.close()

    def tell(self, call: RankCall) -> None:
        """Sends `call` to every follower. Raises EngineError if one is gone."""
        self._followers.broadcast(call)

    def tell_each(self, messages: SequenceOf[RankCall]) -> None:
        """Sends every follower its own call, rank 1's first. Raises EngineError if one is gone."""
        for rank, call in enumerate(messages, start=1):
            self._followers.send(rank, call)

    def tell_one(self, rank: int, call: RankCall) -> None:
        """Sends `call` to that follower. Raises EngineError if it is gone."""
        self._followers.send(rank, call)

    def ask(self, call: RankCall) -> int:
        """See `RankFollowers.ask`. Any thread may call it, and wait for the `answers`."""
        return self._followers.ask(call)

    def answers(self, number: int, wait_s: float, beat: Beat = no_pulse) -> list[bytes]:
        """See `RankFollowers.answers`."""
        return self._followers.answers(number, wait_s, beat)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Guards a call that all ranks receive and execute.

        Raises EngineError, in plain words, if an exchange fails, or this rank's device. Whatever it raises,
        the others have begun what this rank has not done: nothing is done together any more.
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
        """Waits until the device has passed `event`.

        Raises EngineError after STEP_S, or once a follower or the device is lost.
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
        """Parts from the followers; waits for no answer of a group that has lost one."""
        if self.whole:
            self._followers.dismiss()
            self.group.close()
        self._followers.close()


class WatchedEvent:
    """A device's event, waited for with an eye on the followers."""

    def __init__(self, event: torch.cuda.Event, leader: RankLeader) -> None:
        self._event = event
        self._leader = leader

    def synchronize(self) -> None:
        """Blocks until the device has passed it. Raises EngineError after STEP_S, or if a follower ends."""
        self._leader.wait(self._event)

    def query(self) -> bool:
        """True if the device has passed it. A follower that has ended is noticed by `synchronize`."""
        with self._leader.together():
            return bool(self._event.query())


def join_leader(rank_info: RankInfo, channel: RankChannel, device: str, wait_s: float) -> ProcessGroup | None:
    """A follower's part of `RankLeader.meet`; None if rank 0 has left.

    It joins at rank 0's word: ranks may load for much longer than a group waits.
    """
    channel.ready()
    return None if channel.read() is None else ProcessGroup(rank_info, device, wait_s)
