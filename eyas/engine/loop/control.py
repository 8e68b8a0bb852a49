"""Commands of an operator to an engine, beside requests: pauses, and memory that leaves and comes back.

Commands are carried out in order, one at a time, between two steps. Memory moves on a thread of its own, so
that the loop goes on and says that it is alive; no step runs meanwhile. Requests that come while the engine
is paused wait in its queue; while it sleeps without a pause they are refused: nothing says that it will wake.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from eyas.common.errors import Busy, ConfigError, EyasError, InvalidRequest
from eyas.common.wire.control import (
    ContinueGeneration,
    ControlOutcome,
    MemoryMove,
    MemoryTag,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
)
from eyas.common.wire.message import WireFailure
from eyas.engine.ipc.messages import ControlEngine, EngineControlled
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.kv.movable import MovableMemory
from eyas.engine.loop.step_loop import StepLoop
from eyas.engine.scheduling.ranked import Schedulers
from eyas.engine.scheduling.requests import RequestTable

_log = logging.getLogger("eyas.engine")

MemoryParts = Mapping[MemoryTag, SequenceOf[MovableMemory]]
"""What each tag moves. A tag that is not there cannot leave; one with nothing stays where it is."""


@dataclass(frozen=True)
class _Moves:
    """Memory that has moved; the tags whose memory is `here` after that, of those that were to move."""

    here: SequenceOf[MemoryTag]
    moved: SequenceOf[MemoryMove]
    error: ConfigError | None = None


@dataclass
class EngineControl:
    """Carries commands out. `work`: what the engine still has, as words. `forget`: whatever else it knows of
    answers goes with the prefix cache.
    """

    loop: StepLoop
    scheduler: Schedulers
    requests: RequestTable
    outbox: EventOutbox
    memory: MemoryParts
    work: Callable[[], str]
    forget: Callable[[], None]
    paused: frozenset[PauseMode] = frozenset()  # by these, one after the other; empty: it is not
    released: tuple[MemoryTag, ...] = ()
    _queue: deque[tuple[ControlEngine, float]] = field(default_factory=deque)  # and when it came
    _until: float | None = None  # monotonic seconds: when a pause ends by itself
    _moving: Future[_Moves] | None = None
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="move-memory")
    )

    @property
    def runs(self) -> bool:
        """Whether steps may run."""
        return not (self.paused or self.released)

    @property
    def waits(self) -> bool:
        """Whether a command waits, as for the end of what runs."""
        return bool(self._queue)

    @property
    def _keeps(self) -> bool:
        """Whether what comes in a pause keeps its KV, if memory is to leave."""
        return self.paused <= {PauseMode.IN_PLACE}

    @property
    def moving(self) -> bool:
        """Whether memory moves just now."""
        return self._moving is not None

    def receive(self, command: ControlEngine) -> None:
        """Queues a command. One `EngineControlled` follows."""
        self._queue.append((command, time.monotonic()))

    def poll(self, now: float) -> None:
        """Runs once a loop: carries out what can be, in order."""
        while self._queue:
            command, came = self._queue[0]
            try:
                outcome = self._carry_out(command, now - came)
                answer = None if outcome is None else EngineControlled(command.call, outcome)
            except EyasError as error:
                answer = EngineControlled(command.call, failure=WireFailure.of(error))
            self._say_what_waits()
            if answer is None:
                return
            self._queue.popleft()
            self.outbox.add(answer)
        if self._until is not None and now > self._until and not self.released:
            _log.warning("nobody has ended the pause: generation goes on at its limit")
            self._go_on()
            self._say_what_waits()

    def close(self) -> None:
        """Waits until nothing moves any more."""
        self._thread.shutdown()

    def _carry_out(self, command: ControlEngine, waited_s: float) -> ControlOutcome | None:
        """The outcome, or None: it is not done yet. Raises EyasError: it cannot be."""
        match command.command:
            case PauseGeneration(mode=mode, limit_s=limit_s):
                self._until = time.monotonic() + limit_s if limit_s else None
                return self._pause(mode)
            case ContinueGeneration():
                if self.released:
                    raise Busy(f"its {_named(self.released)} must be resumed first")
                self._go_on()
                return ControlOutcome()
            case ReleaseMemory(tags=tags, wait_s=wait_s):
                return self._release(tags, waited_s >= wait_s)
            case ResumeMemory(tags=tags):
                return self._resume(tags)

    def _go_on(self) -> None:
        self.paused, self._until = frozenset(), None

    def _pause(self, mode: PauseMode) -> ControlOutcome:
        self.loop.rest()
        self.paused |= {mode}
        match mode:
            case PauseMode.ABORT:
                return ControlOutcome(self.requests.abort())
            case PauseMode.RETRACT:
                return ControlOutcome(self.requests.retract())
            case PauseMode.IN_PLACE:
                return ControlOutcome()

    def _release(self, tags: SequenceOf[MemoryTag], overdue: bool) -> ControlOutcome | None:
        if self._moving is not None:
            return self._moved()
        for tag in tags:
            if tag not in self.memory:
                raise InvalidRequest(f"tags: {tag} cannot leave here (--memory-saver)", param="tags")
        leaving = [tag for tag in MemoryTag if tag in tags and tag not in self.released]
        if busy := self._obstacle(leaving):
            if overdue:
                raise Busy(f"it still has {busy}: pause it (mode abort or retract) first")
            return None
        self.loop.rest()
        self.released += tuple(leaving)
        self._moving = self._thread.submit(self._move, leaving, out=True)
        return None

    def _obstacle(self, leaving: SequenceOf[MemoryTag]) -> str:
        """What still uses the memory, as words; empty: nothing, and where KV leaves the cache is empty."""
        if not leaving:
            return ""
        if MemoryTag.WEIGHTS in leaving and (table := self.requests.adapters) is not None and table.busy:
            return "an adapter that is read or copied"
        if not self.paused and (work := self.work()):
            return work
        if MemoryTag.KV_CACHE not in leaving:
            return ""
        if not self._keeps:
            self.requests.retract()  # what came since
        if self.scheduler.flush() is None:
            return f"{self.scheduler.pool.used} pages in use"
        self.forget()
        return ""

    def _resume(self, tags: SequenceOf[MemoryTag]) -> ControlOutcome | None:
        if self._moving is not None:
            return self._moved()
        coming = [tag for tag in MemoryTag if tag in tags and tag in self.released]
        self._moving = self._thread.submit(self._move, coming, out=False)
        return None

    def _move(self, tags: SequenceOf[MemoryTag], *, out: bool) -> _Moves:
        """Moves the memory of these tags, one after the other, until one fails; on a thread."""
        moved: list[MemoryMove] = []
        for tag in tags:
            began = time.monotonic()
            try:
                size = _move_all(self.memory[tag], out=out)
            except (ConfigError, OSError) as error:
                failed = error if isinstance(error, ConfigError) else ConfigError(str(error))
                return _Moves(tags[len(moved) :] if out else tags[: len(moved)], moved, failed)
            moved.append(MemoryMove(tag, size, time.monotonic() - began))
        return _Moves(() if out else tags, moved)

    def _moved(self) -> ControlOutcome | None:
        """The outcome of what moves, or None: it still does. Raises ConfigError; EngineError if a rank is
        lost.
        """
        moving = self._moving
        assert moving is not None
        if not moving.done():
            return None
        self._moving = None
        moves = moving.result()
        self.released = tuple(tag for tag in self.released if tag not in moves.here)
        if moves.error is not None:
            raise moves.error
        return ControlOutcome(moved=tuple(moves.moved))

    def _say_what_waits(self) -> None:
        """New requests are refused while memory is away, but where a pause says that they may wait. No pages
        are lent meanwhile: what were written there would be lost, and elsewhere is no memory to write to.
        """
        self.requests.lends = self._keeps and MemoryTag.KV_CACHE not in self.released
        away = f"it sleeps: its {_named(self.released)} must be resumed first (/resume_memory_occupation)"
        self.requests.asleep = away if self.released and not self.paused else ""


def _move_all(memory: SequenceOf[MovableMemory], *, out: bool) -> int:
    """Moves all of it, or none if a part fails; the bytes. Raises ConfigError or OSError."""
    moved: list[MovableMemory] = []
    size = 0
    try:
        for part in memory:
            size += part.release() if out else part.restore()
            moved.append(part)
    except (ConfigError, OSError):
        for part in moved:
            part.restore() if out else part.release()
        raise
    return size


def _named(tags: SequenceOf[MemoryTag]) -> str:
    return " and ".join(tags)
