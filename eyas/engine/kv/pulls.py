"""Puller-side glue: gives pull machines pages, copies and a voice, one after the other.

The rules are `kv_transfer.puller`; bytes are moved by a `Copier`. Who wants the pages, what for, and whose
turn it is, is the business of the `Destination`. Used by decode engines (target KV) and draft engines (draft
KV).
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from eyas.common.errors import EyasError, TransferFailed, from_code
from eyas.common.types import FirstToken, KvHandle
from eyas.engine.ipc.messages import (
    ClosePull,
    CopyPages,
    CopyStopped,
    Moved,
    OpenPull,
    PullDone,
    PullFailed,
    PullMet,
    PullReady,
    PullReleased,
    ReleasePull,
    StopCopies,
)
from eyas.engine.ipc.outbox import Outbox
from kv_transfer.backends.base import Copy, CopyResult
from kv_transfer.copier import Copier
from kv_transfer.puller import (
    CloseWatch,
    Complete,
    Incomplete,
    OpenWatch,
    PagesFree,
    Pull,
    SendRelease,
    State,
)
from kv_transfer.route import Route

Told: TypeAlias = PullMet | PullReady | PullDone | PullFailed | PullReleased | CopyStopped


@dataclass(frozen=True)
class Arrival:
    """The rows of `handle` are in `pages`, validated; the receiver owns the pages now."""

    handle: KvHandle
    pages: list[int]
    first_tokens: tuple[FirstToken, ...]
    last_feature: bytes
    bytes: int
    seconds: float
    path: str


class Destination(Protocol):
    """Who pulls. `owner` is whatever `Pulls.open` was given."""

    def first(self, owners: list[Hashable]) -> Hashable:
        """Who of these, in order of arrival, is lent pages before the others."""
        ...

    def lend(self, owner: Hashable, handle: KvHandle) -> tuple[list[int], int] | None:
        """Pages for all rows of `handle`, and how many of the first are already filled; None: not now."""
        ...

    def arrived(self, owner: Hashable, arrival: Arrival) -> None: ...

    def lost(self, owner: Hashable, error: EyasError) -> None: ...

    def pages_free(self, pages: list[int]) -> None: ...


@dataclass
class _Active:
    number: int
    owner: Hashable
    pull: Pull
    handle: KvHandle
    pages: list[int] = field(default_factory=list)
    route: str = ""  # told by the front when it has met the owner
    fetched: dict[int, Copy] = field(default_factory=dict)  # copies that the front makes, by number


class Pulls:
    def __init__(self, copier: Copier, page_size: int, outbox: Outbox) -> None:
        self._copier = copier
        self._page_size = page_size
        self._outbox = outbox
        self._active: dict[int, _Active] = {}  # by number, in order of arrival
        self._numbers = 0
        self.destination: Destination | None = None
        self.moved: dict[str, Moved] = {}  # running totals by path
        self.failed = 0

    @property
    def active(self) -> int:
        return len(self._active)

    def owners(self, *states: State) -> list[Hashable]:
        """Whose pulls are in one of `states`, in order of arrival."""
        return [active.owner for active in self._active.values() if active.pull.state in states]

    def open(self, owner: Hashable, handle: KvHandle, attempt: int, deadline: float) -> None:
        """Queue a pull; its Watch opens now, so that the lease is alive from the queue place on.

        A handle that makes no sense is `lost` before this returns.
        """
        assert self.destination is not None
        self._numbers += 1
        try:
            if len(handle.shards) != 1 or handle.tokens < 1:
                raise TransferFailed(f"KV handle {handle.id} must have rows, and one shard: this engine's.")
            pull = Pull(self._numbers, handle, attempt, self._page_size, deadline)
        except EyasError as error:
            self.destination.lost(owner, error)
            return
        self._active[self._numbers] = _Active(self._numbers, owner, pull, handle)
        self._act(self._active[self._numbers])

    def refuse(self, handle: KvHandle, attempt: int) -> None:
        """Nobody will pull this handle: its owner may free the pages now."""
        self._numbers += 1
        number = self._numbers
        self._outbox.add(OpenPull(number, handle, attempt), ReleasePull(number), ClosePull(number))

    def cancel(self, owner: Hashable) -> None:
        now = time.monotonic()
        for active in [a for a in self._active.values() if a.owner == owner]:
            active.pull.cancel(now)
            self._act(active)

    def preempt(self) -> bool:
        """Take the pages of the youngest running pull back; False if none gives any back.

        They are free at once, or, while copies into them run, when those have stopped.
        """
        if any(a.pull.state is State.DRAINING for a in self._active.values()):
            return True
        pulling = [a for a in self._active.values() if a.pull.state is State.PULLING]
        if not pulling:
            return False
        pulling[-1].pull.preempt(time.monotonic())
        if pulling[-1].fetched:
            self._outbox.add(StopCopies(pulling[-1].number))
        self._act(pulling[-1])
        return True

    def told(self, command: Told) -> None:
        """What the front heard from the handle's owner, or got from it."""
        active, now = self._active.get(command.pull), time.monotonic()
        if active is None:
            return
        match command:
            case PullMet():
                active.route = command.path
            case PullReady():
                active.pull.ready(command.tokens, now)
            case PullDone():
                active.pull.done(command.choices, command.last_feature, now)
            case PullFailed():
                active.pull.failed(from_code(command.failure.code, command.failure.message), now)
            case PullReleased():
                active.pull.released(command.valid, now)
            case CopyStopped():
                active.pull.copied(_result(active.fetched.pop(command.number), command), now)
        self._act(active)

    def poll(self, now: float) -> None:
        """Once a loop: finished copies, deadlines, and pages for those that wait."""
        assert self.destination is not None
        for result in self._copier.finished():
            active = self._active.get(result.job.pull)
            if active is not None:
                active.pull.copied(result, now)
                self._act(active)
        for active in list(self._active.values()):
            active.pull.sweep(now)
            self._act(active)
        while owners := self.owners(State.WAITING):
            first = self.destination.first(owners)
            waits = (a for a in self._active.values() if a.owner == first and a.pull.state is State.WAITING)
            active = next(waits)
            lent = self.destination.lend(active.owner, active.handle)
            if lent is None:
                return  # the others wait their turn behind it
            active.pages, held = lent
            active.pull.start(tuple(active.pages), held, now)
            self._act(active)

    def _act(self, active: _Active) -> None:
        destination, pull = self.destination, active.pull
        assert destination is not None
        for action in pull.take_actions():
            match action:
                case OpenWatch(handle, attempt):
                    self._outbox.add(OpenPull(active.number, handle, attempt))
                case CloseWatch():
                    self._outbox.add(ClosePull(active.number))
                case SendRelease():
                    self._outbox.add(ReleasePull(active.number))
                case Copy():
                    self._copy(active, action)
                case PagesFree(pages):
                    destination.pages_free(list(pages))
                case Incomplete(error):
                    self.failed += 1
                    destination.lost(active.owner, error)
                case Complete():
                    moved = self.moved.get(action.path, Moved())
                    self.moved[action.path] = moved.plus(action.bytes, action.seconds)
                    arrival = Arrival(
                        handle=active.handle,
                        pages=active.pages,
                        first_tokens=action.first_tokens,
                        last_feature=action.last_feature,
                        bytes=action.bytes,
                        seconds=action.seconds,
                        path=action.path,
                    )
                    destination.arrived(active.owner, arrival)
        if pull.over:
            self._active.pop(active.number, None)

    def _copy(self, active: _Active, job: Copy) -> None:
        """Bytes that no memory shares come through the fronts, all others through the copy thread."""
        if active.route == Route.GRPC:
            active.fetched[job.number] = job
            self._outbox.add(CopyPages(active.number, job.number, job.source.pages, job.dst_pages))
        else:
            self._copier.submit(job)


def _result(job: Copy, stopped: CopyStopped) -> CopyResult:
    failure = stopped.failure
    error = None if failure is None else from_code(failure.code, failure.message)
    return CopyResult(job, Route.GRPC, stopped.bytes, stopped.seconds, error)
