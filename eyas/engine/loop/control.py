"""An operator's commands to an engine: pause and continue generation, release and resume memory.

Commands run in order, one at a time, between two steps. Memory is moved by a separate thread, so that the
loop keeps reporting that it is alive; no step runs meanwhile. Requests that arrive during a pause wait in the
queue. While memory is released without a pause they are refused, because the engine may never wake.
"""

from __future__ import annotations

import contextlib
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
"""The memory that belongs to each tag. A missing tag cannot be released; an empty one is released trivially.
"""


@dataclass(frozen=True)
class _Moves:
    """The result of moving memory. `here`: those of the tags whose memory is on the device afterwards."""

    here: SequenceOf[MemoryTag]
    moved: SequenceOf[MemoryMove]
    error: ConfigError | None = None


@dataclass
class EngineControl:
    """Carries out commands. `work` describes the engine's unfinished work; empty: none. `forget` drops recent
    answers when the prefix cache is flushed.
    """

    loop: StepLoop
    scheduler: Schedulers
    requests: RequestTable
    outbox: EventOutbox
    memory: MemoryParts
    work: Callable[[], str]
    forget: Callable[[], None]
    paused: frozenset[PauseMode] = frozenset()  # the modes of all pauses since it last ran; empty: it runs
    released: tuple[MemoryTag, ...] = ()
    _queue: deque[tuple[ControlEngine, float]] = field(default_factory=deque)  # with arrival times
    _until: float | None = None  # monotonic seconds at which a pause ends by its limit
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
        """Whether a command waits, as for running requests to end."""
        return bool(self._queue)

    @property
    def _keeps_kv(self) -> bool:
        """Whether requests keep their KV during the pause, even if memory is to be released."""
        return self.paused <= {PauseMode.IN_PLACE}

    @property
    def moving(self) -> bool:
        """Whether memory is being moved."""
        return self._moving is not None

    def receive(self, command: ControlEngine) -> None:
        """Queues a command, which is answered by one `EngineControlled`."""
        self._queue.append((command, time.monotonic()))

    def poll(self, now: float) -> None:
        """Carries out the queued commands that can be, in order; called once per iteration of the loop."""
        while self._queue:
            command, arrived = self._queue[0]
            try:
                outcome = self._carry_out(command, now - arrived)
                answer = None if outcome is None else EngineControlled(command.call, outcome)
            except EyasError as error:
                answer = EngineControlled(command.call, failure=WireFailure.of(error))
            self._update_admission()
            if answer is None:
                return
            self._queue.popleft()
            self.outbox.add(answer)
        if self._until is not None and now > self._until and not self.released:
            _log.warning("nobody has ended the pause: generation goes on at its limit")
            self._continue()
            self._update_admission()

    def close(self) -> None:
        """Waits until no memory is being moved."""
        self._thread.shutdown()

    def _carry_out(self, command: ControlEngine, waited_s: float) -> ControlOutcome | None:
        """The outcome of a command; None if it is not done yet. Raises EyasError if it is impossible."""
        match command.command:
            case PauseGeneration(mode=mode, limit_s=limit_s):
                self._until = time.monotonic() + limit_s if limit_s else None
                return self._pause(mode)
            case ContinueGeneration():
                if self.released:
                    raise Busy(f"its {_named(self.released)} must be resumed first")
                self._continue()
                return ControlOutcome()
            case ReleaseMemory(tags=tags, wait_s=wait_s):
                return self._release(tags, waited_s >= wait_s)
            case ResumeMemory(tags=tags):
                return self._resume(tags)

    def _continue(self) -> None:
        self.paused, self._until = frozenset(), None

    def _pause(self, mode: PauseMode) -> ControlOutcome:
        self.loop.quiesce()
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
            return self._move_outcome()
        for tag in tags:
            if tag not in self.memory:
                raise InvalidRequest(f"tags: {tag} cannot leave here (--memory-saver)", param="tags")
        leaving = [tag for tag in MemoryTag if tag in tags and tag not in self.released]
        if busy := self._obstacle(leaving):
            if overdue:
                raise Busy(f"it still has {busy}: pause it (mode abort or retract) first")
            return None
        self.loop.quiesce()
        self.released += tuple(leaving)
        self._moving = self._thread.submit(self._move, leaving, out=True)
        return None

    def _obstacle(self, leaving: SequenceOf[MemoryTag]) -> str:
        """What still uses the memory, in words; empty: nothing. Flushes the cache if KV is to be released."""
        if not leaving:
            return ""
        if MemoryTag.WEIGHTS in leaving and (table := self.requests.adapters) is not None and table.busy:
            return "an adapter that is read or copied"
        if not self.paused and (work := self.work()):
            return work
        if MemoryTag.KV_CACHE not in leaving:
            return ""
        if not self._keeps_kv:
            self.requests.retract()  # requests that arrived since the pause
        if self.scheduler.flush() is None:
            return f"{self.scheduler.pool.used} pages in use"
        self.forget()
        return ""

    def _resume(self, tags: SequenceOf[MemoryTag]) -> ControlOutcome | None:
        if self._moving is not None:
            return self._move_outcome()
        coming = [tag for tag in MemoryTag if tag in tags and tag in self.released]
        self._moving = self._thread.submit(self._move, coming, out=False)
        return None

    def _move(self, tags: SequenceOf[MemoryTag], *, out: bool) -> _Moves:
        """Moves the memory of these tags sequentially until one fails; runs in the thread.

        If one cannot be released, those that were are restored, so that the engine sleeps wholly or not at
        all.
        """
        moved: list[MemoryMove] = []
        for tag in tags:
            began = time.monotonic()
            try:
                size = _move_all(self.memory[tag], out=out)
            except (ConfigError, OSError) as error:
                failed = error if isinstance(error, ConfigError) else ConfigError(str(error))
                here = tags[len(moved) :] if out else tags[: len(moved)]
                return _Moves([*self._restored(moved), *here] if out else here, moved, failed)
            moved.append(MemoryMove(tag, size, time.monotonic() - began))
        return _Moves(() if out else tags, moved)

    def _restored(self, released: SequenceOf[MemoryMove]) -> list[MemoryTag]:
        """Restores memory that was released just now; returns the tags for which that succeeded."""
        restored = []
        for move in released:
            with contextlib.suppress(ConfigError, OSError):
                _move_all(self.memory[move.tag], out=False)
                restored.append(move.tag)
        return restored

    def _move_outcome(self) -> ControlOutcome | None:
        """The outcome of the move; None while it runs. Raises ConfigError, or EngineError if a rank is
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

    def _update_admission(self) -> None:
        """Has new requests refused while memory is released, unless a pause lets them wait. No pages are lent
        to other workers meanwhile: data written to released pages would be lost.
        """
        self.requests.lends = self._keeps_kv and MemoryTag.KV_CACHE not in self.released
        away = f"it sleeps: its {_named(self.released)} must be resumed first (/resume_memory_occupation)"
        self.requests.asleep = away if self.released and not self.paused else ""


def _move_all(memory: SequenceOf[MovableMemory], *, out: bool) -> int:
    """Moves all parts, or none if one fails; returns the bytes moved. Raises ConfigError or OSError."""
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
