"""Weight updates of a serving engine: prepared in a separate thread, written between two steps.

The gateway orders the phases over the cluster (`gateway.routing.weights`): prepare, close, commit or drop.
This module carries them out on one worker. A closed worker that receives no commit in time opens again with
its old weights.
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
    """Weights that were read, checked and rehearsed. `digest`: a hash of their content. `file`: the tensors;
    after the write, the tensors that were replaced; None once freed.
    """

    digest: str
    tensors: int
    nbytes: int
    file: Any = None


class WeightStore(Protocol):
    """The weights of an engine on all of its ranks. Methods raise EyasError with a message for the operator.

    `write` and `check_join` are called by the engine's thread, the others by a second thread, one at a time.
    `read` has a third thread, because a join may wait for long, and never runs during a `drop`.
    """

    def stage(self, update: PrepareWeights) -> StagedWeights:
        """Reads and rehearses an update; the one before must have been dropped."""

    def drop(self, staged: StagedWeights) -> None:
        """Frees the tensors of `staged`."""

    def tidy(self) -> None:
        """Frees the buffers for the next update, which takes seconds if they are page-locked."""

    def write(self, staged: StagedWeights, beat: Beat) -> None:
        """Writes the staged tensors over the weights; no step runs meanwhile."""

    def read(self, name: str, count: int) -> tuple[float, ...]:
        """The first `count` numbers of a tensor as it was stored."""

    def check_join(self, group: str, backend: str) -> None:
        """Raises InvalidRequest if this engine cannot join such a group; does not wait."""

    def join(self, command: JoinGroup) -> None:
        """Joins a `torch.distributed` group whose rank 0 sends weights."""

    def leave(self, group: str) -> None:
        """Leaves the group."""


@dataclass(frozen=True)
class _Closing:
    """An engine that is closed for an update, or that waits for its requests to end until it is.

    `quiet`: the requests have ended, and the call to close was answered. `commit`: the call that commits the
    update, once received.
    """

    call: int
    until: float  # monotonic seconds: the deadline of the wait, or of the closure
    command: CloseForWeights
    requests: int
    quiet: bool = False
    commit: int | None = None


@dataclass
class WeightUpdates:
    """Carries out the phases of updates on one engine.

    `work` describes the engine's unfinished work, as "2 requests"; empty: none. `forget` drops the prefix
    cache, and returns None if pages are in use. `between` runs a call between two steps. `away`: whether the
    memory of the weights is released. `paused`: the pauses in effect, during which queued requests do not
    run.
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
    _quiet_from: float | None = None  # monotonic seconds of the last answer; None: no memory to free
    _closing: _Closing | None = None

    # --- commands --------------------------------------------------------------------------------------

    def receive(self, call: WeightsCall) -> None:
        """Carries out a command, or begins to; it is answered by one `WeightsAnswer`."""
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
                case CheckJoin():  # immediately, even if the thread waits
                    self._check_join(command)
                    self._answer(call.call, WeightsReply())
                    return
                case PrepareWeights():
                    self._check(command)
        except EyasError as error:
            self._refuse(call.call, error)
            return
        thread = self._reader if isinstance(command, ReadWeight) else self._thread
        self._running.append((call, thread.submit(self._run_in_thread, command)))

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

    def _run_in_thread(self, command: object) -> WeightsReply:
        """Carries out a command that takes long, in a thread next to the engine's."""
        began = time.monotonic()
        match command:
            case PrepareWeights():
                before, self._staged = self._staged, None
                if before is not None:
                    self._free(before[1])
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
            if closing.commit is None:  # a repeated call: other workers still have requests
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
        elif self.paused():  # queued requests would never end
            self.requests.turn_away(WeightsChanging("new weights come in a pause"))
        self._closing = _Closing(call, time.monotonic() + command.wait_s, command, ended)
        self.info = msgspec.structs.replace(self.info, closed=True)

    def _commit(self, call: int, command: CommitWeights) -> None:
        closing = self._closing
        if closing is None and command.digest == self.info.digest:  # another gateway has committed it
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
        """Frees the staged weights, unless others are being prepared, which replace them."""
        if self._staged is None or self._preparing:
            return
        staged, self._staged = self._staged[1], None
        self._thread.submit(self._free, staged)

    def _free(self, staged: StagedWeights) -> None:
        with self._reading:  # a reader may still use the memory that is freed
            self.store.drop(staged)

    @property
    def _preparing(self) -> bool:
        return any(isinstance(call.command, PrepareWeights) for call, _ in self._running)

    # --- the loop --------------------------------------------------------------------------------------

    def poll(self, now: float) -> None:
        """Answers finished commands, and ends closures that are due; called once per iteration of the
        loop.
        """
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
        elif PauseMode.ABORT in self.paused():  # a prefill worker may be paused a little later than decode
            self.requests.abort_begun()

    def _tidy(self) -> None:
        """Frees what was prepared, since no commit followed within the time that other workers may need."""
        if not self._preparing:
            self._quiet_from = None
            self._forget()
            self._thread.submit(self.store.tidy)

    @property
    def looks(self) -> bool:
        """Whether `poll` should be called often."""
        return bool(self._running) or self.waits

    @property
    def waits(self) -> bool:
        """Whether an update waits for running requests to end."""
        return self._closing is not None and not self._closing.quiet

    def _write(self, call: int) -> None:
        if self._closing is None or self._closing.commit != call:
            return  # the commit came too late
        try:
            self._check_writable()
        except EyasError as error:  # memory was released after the engine was closed
            self._refuse(call, error)
            self._open()
            return
        adapters = self.requests.adapters
        if (
            adapters is not None and adapters.busy
        ) or self.forget() is None:  # a busy table still reads the weights
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
        """Stops the threads without waiting: they end with the process."""
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
