"""New weights for an engine that serves: prepared by a thread of its own, put in place between two steps.

The cluster's order of steps is the gateway's (`gateway.routing.weights`). Here each step is done, or undone,
on one worker: a worker that is closed and hears nothing more opens again with the weights that it had.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from eyas.common.errors import (
    Busy,
    EngineError,
    EyasError,
    InvalidRequest,
    NotFound,
    WeightsChanged,
    WeightsChanging,
)
from eyas.common.types import WeightsInfo
from eyas.common.weights import (
    PREPARE_S,
    CheckJoin,
    CloseForWeights,
    CommitWeights,
    DropWeights,
    FolderSource,
    JoinGroup,
    LeaveGroup,
    PrepareWeights,
    ReadWeight,
    Running,
    WeightsReply,
)
from eyas.common.wire.control import PauseMode
from eyas.common.wire.message import WireFailure
from eyas.engine.ipc.messages import WeightsAnswer, WeightsCall
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.ipc.pulse import Beat
from eyas.engine.scheduling.requests import RequestTable

_log = logging.getLogger("eyas.engine")


@dataclass
class StagedWeights:
    """Weights that were read, checked and rehearsed. `digest`: of their content. `file`: the tensors; once
    written, those that they have replaced; None: they were let go.
    """

    digest: str
    tensors: int
    nbytes: int
    file: Any = None


class WeightStore(Protocol):
    """The weights of an engine, on all of its ranks. Its methods raise EyasError, which names what is wrong;
    all but `write` and `check_join` are called by a thread beside the engine's, one at a time; `read` by one
    of its own, since a join may wait for long, but never during a `drop`.
    """

    def stage(self, update: PrepareWeights) -> StagedWeights:
        """Reads and rehearses an update; the one before must have been dropped."""

    def drop(self, staged: StagedWeights) -> None:
        """Lets the tensors of `staged` go."""

    def tidy(self) -> None:
        """Lets go what it keeps for the next update, which takes seconds if it is page-locked."""

    def write(self, staged: StagedWeights, beat: Beat) -> None:
        """Puts what is staged in place; no step runs meanwhile."""

    def read(self, name: str, count: int) -> tuple[float, ...]:
        """The first numbers of a tensor as it was stored."""

    def check_join(self, group: str, backend: str) -> None:
        """Raises InvalidRequest if it could not join one; waits for nothing."""

    def join(self, command: JoinGroup) -> None:
        """Joins a group of processes that give weights."""

    def leave(self, group: str) -> None:
        """Leaves it."""


@dataclass(frozen=True)
class _Closing:
    """A call that waits for the end of what runs; once it is answered, the engine stays closed until then.
    `commit`: the call that has the new weights put in place, if it has come.
    """

    call: int
    until: float  # monotonic seconds
    command: CloseForWeights
    requests: int
    quiet: bool = False
    commit: int | None = None


@dataclass
class WeightUpdates:
    """`work`: what the engine still has, as "2 requests"; empty: nothing. `forget`: drops all that is cached;
    None: pages are in use. `between`: runs a call between two steps. `away`: their memory has left. `paused`:
    how, if what waits in the queue does not run.
    """

    store: WeightStore
    requests: RequestTable
    outbox: EventOutbox
    work: Callable[[], str]
    forget: Callable[[], int | None]
    between: Callable[[Callable[[], None]], None]
    beat: Beat
    away: Callable[[], bool]
    paused: Callable[[], Collection[PauseMode]]
    info: WeightsInfo = WeightsInfo()
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "weights"))
    _reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "read weights"))
    _reading: threading.Lock = field(default_factory=threading.Lock)
    _running: list[tuple[WeightsCall, Future[WeightsReply]]] = field(default_factory=list)
    _staged: tuple[PrepareWeights, StagedWeights] | None = None
    _quiet_from: float | None = None  # monotonic seconds; None: there is nothing to let go
    _closing: _Closing | None = None

    # --- commands --------------------------------------------------------------------------------------

    def receive(self, call: WeightsCall) -> None:
        """Carries out a command, or begins to; one `WeightsAnswer` follows."""
        command = call.command
        try:
            match command:
                case CloseForWeights():
                    self._close(call.call, command)
                    return
                case CommitWeights():
                    self._commit(call.call, command)
                    return
                case DropWeights(digest=digest):
                    self._drop(digest)
                    self._answer(call.call, WeightsReply())
                    return
                case CheckJoin():  # at once, whatever the thread waits for
                    self._check_join(command)
                    self._answer(call.call, WeightsReply())
                    return
                case PrepareWeights():
                    self._check(command)
        except EyasError as error:
            self._refuse(call.call, error)
            return
        thread = self._reader if isinstance(command, ReadWeight) else self._thread
        self._running.append((call, thread.submit(self._aside, command)))

    def _check(self, command: PrepareWeights) -> None:
        if self._closing is not None:
            raise Busy("another update of the weights is being put in place")
        if command.generation <= self.info.generation:
            raise InvalidRequest(f"generation {command.generation}: this worker has {self.info.generation}")

    def _check_join(self, command: CheckJoin) -> None:
        joins = (call.command for call, _ in self._running if isinstance(call.command, JoinGroup))
        if any(join.group == command.group for join in joins):
            raise Busy(f"this worker waits for the others of a group {command.group!r}")
        self.store.check_join(command.group, command.backend)

    def _check_writable(self) -> None:
        """Raises Busy if the weights cannot be written just now."""
        if self.away():
            raise Busy("the memory of its weights has left: it must be resumed first")

    def _aside(self, command: object) -> WeightsReply:
        """Runs in the thread beside the engine's."""
        began = time.monotonic()
        match command:
            case PrepareWeights():
                before, self._staged = self._staged, None
                if before is not None:
                    self._let_go(before[1])
                staged = self.store.stage(command)
                self._staged = command, staged
                reply = WeightsReply(staged.digest, staged.tensors, staged.nbytes)
            case ReadWeight(name=name, count=count):
                with self._reading:
                    reply = WeightsReply(numbers=self.store.read(name, count))
            case JoinGroup():
                self.store.join(command)
                reply = WeightsReply()
            case LeaveGroup(group=group):
                self.store.leave(group)
                reply = WeightsReply()
            case _:
                raise AssertionError(command)
        return msgspec.structs.replace(reply, seconds=time.monotonic() - began)

    def _close(self, call: int, command: CloseForWeights) -> None:
        if self._staged is None or self._staged[1].digest != command.digest:
            raise NotFound(f"no weights {command.digest} are prepared here")
        self._check_writable()
        closing = self._closing
        if closing is not None and closing.quiet and closing.command.digest == command.digest:
            if closing.commit is None:  # a reminder: other workers still have requests
                self._closing = replace(closing, until=time.monotonic() + command.hold_s)
            self._answer(call, WeightsReply(requests=closing.requests))
            return
        if self._preparing or self._closing is not None:
            raise Busy("another update of the weights is under way")
        self.requests.closed = WeightsChanging("the worker is about to get new weights")
        ended = 0
        if command.running is not Running.DRAIN:
            restarts = command.running is Running.RESTART
            ended = self.requests.end_all(WeightsChanging("new weights come") if restarts else _aborted())
        elif self.paused():  # else it would be waited for in vain
            self.requests.turn_away(WeightsChanging("new weights come in a pause"))
        self._closing = _Closing(call, time.monotonic() + command.wait_s, command, ended)
        self.info = msgspec.structs.replace(self.info, closed=True)

    def _commit(self, call: int, command: CommitWeights) -> None:
        closing = self._closing
        if closing is None and command.digest == self.info.digest:  # another gateway had it done
            self._answer(call, WeightsReply(command.digest, seconds=self.info.seconds))
            return
        if closing is None or not closing.quiet or closing.command.digest != command.digest:
            raise NotFound(f"this worker is not closed for weights {command.digest}")
        if closing.commit is not None:
            self.between(lambda: self.receive(WeightsCall(call, command)))
            return
        until = time.monotonic() + closing.command.hold_s
        self._closing = replace(closing, commit=call, until=until)
        self.between(lambda: self._write(call))

    def _drop(self, digest: str) -> None:
        other = self._closing is not None and self._closing.command.digest != digest
        if other or (self._staged is not None and digest != self._staged[1].digest):
            return
        if self._closing is not None and self._closing.commit is not None:
            raise Busy("these weights are being put in place")
        self._forget()
        self._open()

    def _forget(self) -> None:
        """Has what is staged let go, unless other weights are being prepared: they take its place."""
        if self._staged is None or self._preparing:
            return
        staged, self._staged = self._staged[1], None
        self._thread.submit(self._let_go, staged)

    def _let_go(self, staged: StagedWeights) -> None:
        with self._reading:  # of what served before: its memory is the next update's
            self.store.drop(staged)

    @property
    def _preparing(self) -> bool:
        return any(isinstance(call.command, PrepareWeights) for call, _ in self._running)

    # --- the loop --------------------------------------------------------------------------------------

    def poll(self, now: float) -> None:
        """Runs once a loop: answers what the thread has done, and closings."""
        if self._running:
            ended = [(call, done) for call, done in self._running if done.done()]
            self._running = [each for each in self._running if each not in ended]
            for call, done in ended:
                self._answer(call.call, _result(done))
        closing = self._closing
        if closing is None:
            if self._quiet_from is not None and now >= self._quiet_from + PREPARE_S:
                self._tidy()
            return
        if closing.quiet:
            if now >= closing.until:
                if closing.commit is not None:
                    self._refuse(closing.commit, Busy("pages or adapters are still in use"))
                _log.warning("no word of the new weights: this worker serves the old ones again")
                self._forget()
                self._open()
        elif not (work := self.work()):
            self._closing = replace(closing, quiet=True, until=now + closing.command.hold_s)
            self._answer(closing.call, WeightsReply(requests=closing.requests))
        elif now >= closing.until:
            self._refuse(closing.call, Busy(f"it still has {work}"))
            self._open()
        elif PauseMode.ABORT in self.paused():  # prefill heard of the pause a little later than decode
            self.requests.abort_begun()

    def _tidy(self) -> None:
        """Drops what was prepared, since nothing has followed: others may take as long to prepare theirs."""
        if not self._preparing:
            self._quiet_from = None
            self._forget()
            self._thread.submit(self.store.tidy)

    @property
    def looks(self) -> bool:
        """True if `poll` should be called often."""
        return bool(self._running) or self.waits

    @property
    def waits(self) -> bool:
        """Whether an update waits for the end of what runs."""
        return self._closing is not None and not self._closing.quiet

    def _write(self, call: int) -> None:
        if self._closing is None or self._closing.commit != call:
            return  # it took too long
        try:
            self._check_writable()
        except EyasError as error:  # of what came after it was closed
            self._refuse(call, error)
            self._open()
            return
        adapters = self.requests.adapters
        if (adapters is not None and adapters.busy) or self.forget() is None:  # busy: gains are read
            self.between(lambda: self._write(call))
            return
        assert self._staged is not None
        began, (update, staged) = time.monotonic(), self._staged
        self.store.write(staged, self.beat)
        if adapters is not None:
            adapters.renew(self.beat)
        seconds = time.monotonic() - began
        folder = update.source.path if isinstance(update.source, FolderSource) else ""
        self.info = WeightsInfo(
            update.version, update.generation, staged.digest, folder, closed=True, seconds=seconds
        )
        self.requests.weights = staged.digest
        self._forget()
        _log.info("weights %r (%s) in place after %.3f s", update.version, staged.digest, seconds)
        self._open()
        self._answer(call, WeightsReply(staged.digest, staged.tensors, staged.nbytes, seconds))

    def _open(self) -> None:
        self._closing = None
        self.requests.closed = None
        self.info = msgspec.structs.replace(self.info, closed=False)

    def _answer(self, call: int, reply: WeightsReply) -> None:
        self._quiet_from = time.monotonic()
        self.outbox.add(WeightsAnswer(call, reply))

    def _refuse(self, call: int, error: EyasError) -> None:
        self._answer(call, WeightsReply(failure=WireFailure.of(error)))

    def close(self) -> None:
        """Waits for nothing: the thread ends with the process."""
        for thread in (self._thread, self._reader):
            thread.shutdown(wait=False, cancel_futures=True)


def _aborted() -> WeightsChanged:
    return WeightsChanged("aborted: new weights come")


def _result(done: Future[WeightsReply]) -> WeightsReply:
    try:
        return done.result()
    except EngineError:  # a rank is lost, and the engine with it
        raise
    except EyasError as error:
        return WeightsReply(failure=WireFailure.of(error))
    except Exception as error:
        _log.exception("new weights could not be read")
        return WeightsReply(failure=WireFailure.of(EyasError(f"{type(error).__name__}: {error}")))
