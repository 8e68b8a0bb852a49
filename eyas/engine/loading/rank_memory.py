"""Memory of all ranks that leaves and comes back together: others do what rank 0 does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eyas.common.errors import ConfigError
from eyas.engine.kv.movable import MovableMemory
from eyas.engine.parallel.leader import RankLeader
from eyas.engine.parallel.ranks import RankCall, RankCalls, RankChannel

RELEASE, RESTORE = "release memory", "restore memory"
MOVE_S = 120.0  # the first time much of the host's memory is locked


class LeaderMemory:
    """A `MovableMemory`: part number `part` of each rank's, which ranks have in the same order."""

    def __init__(self, own: MovableMemory, leader: RankLeader, part: int) -> None:
        self._own, self._leader, self._part = RankMemory(own), leader, part

    def release(self) -> int:
        """Bytes that left all ranks. Raises ConfigError, as the first rank does that cannot; EngineError if
        one ends.
        """
        return self._move(RELEASE, RESTORE)

    def restore(self) -> int:
        """Bytes that came back. Raises as `release`."""
        return self._move(RESTORE, RELEASE)

    def _move(self, kind: str, back: str) -> int:
        answers = self._all(kind)
        for rank, (_, failure) in enumerate(answers):
            if failure:
                self._all(back)  # those that have moved; the others are there
                raise ConfigError(f"rank {rank}: {failure}")
        return sum(size for size, _ in answers)

    def _all(self, kind: str) -> list[tuple[int, str]]:
        """The bytes that moved on each rank, and why none did."""
        number = self._leader.ask(RankCall(kind, (self._part,)))
        own = self._own.move(kind)
        others = [answer.decode().partition(" ") for answer in self._leader.answers(number, MOVE_S)]
        return [own, *((int(size), failure) for size, _, failure in others)]


class FollowerMemory:
    """The same on a rank above 0. `calls`: what it does, by their kinds."""

    def __init__(
        self, parts: Sequence[MovableMemory], channel: RankChannel, settle: Callable[[], None]
    ) -> None:
        """`settle`: waits until the device has computed the steps that were launched."""
        self._parts, self._channel, self._settle = [*map(RankMemory, parts)], channel, settle
        self.calls: RankCalls = {RELEASE: self._move, RESTORE: self._move}

    def _move(self, call: RankCall) -> None:
        number, part = call.numbers
        self._settle()
        size, failure = self._parts[part].move(call.kind)
        self._channel.answer(number, f"{size} {failure}".encode())


class RankMemory:
    """A part of one rank's memory, which knows where it is."""

    def __init__(self, memory: MovableMemory) -> None:
        self._memory = memory
        self._away = False

    def move(self, kind: str) -> tuple[int, str]:
        """Bytes that moved; 0 if it is there already, or cannot move, and then why."""
        out = kind == RELEASE
        if out is self._away:
            return 0, ""
        try:
            size = self._memory.release() if out else self._memory.restore()
        except (ConfigError, OSError) as error:
            return 0, str(error)
        self._away = out
        return size, ""
