"""Runs pulls: provides the state machines of `kv_transfer.puller` with pages, copies and messages.

A `PageCopier` moves the bytes by a route that a first copy has proven. The `PullDestination` decides which
pull gets pages next, and uses the pages. Used by decode engines (target KV) and draft engines (draft KV).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, get_args

from eyas.common.errors import EyasError, TransferFailed
from eyas.common.types import FirstToken, KvHandle
from eyas.engine.ipc.messages import (
    ClosePull,
    CopyStaged,
    CopyStopped,
    OpenPull,
    PullDone,
    PullFailed,
    PullMet,
    PullReady,
    PullReleased,
    ReleaseHandle,
    ReleasePull,
    TransferTotals,
)
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.kv.approach import RouteTrial
from eyas.engine.kv.front_wire import FrontWire
from eyas.engine.kv.groups import ONE_GROUP, KvGroups, handle_pages
from eyas.engine.kv.probe import LinkProber
from kv_transfer.backends.base import CopyJob
from kv_transfer.copier import PageCopier
from kv_transfer.peers import KvPeer, KvPeers, PeerRoutes
from kv_transfer.puller import (
    Action,
    AskVerdict,
    CloseWatch,
    OpenWatch,
    PagesFree,
    PullAttempt,
    PullComplete,
    PullIncomplete,
    PullState,
    SendRelease,
)

PullReport: TypeAlias = PullMet | PullReady | PullDone | PullFailed | PullReleased | CopyStaged | CopyStopped
PULL_REPORTS: tuple[type, ...] = get_args(PullReport)


@dataclass(frozen=True)
class PullArrival:
    """A successful pull: the rows of `handle` are in `pages`, validated; the receiver owns the pages."""

    handle: KvHandle
    pages: list[int]
    first_tokens: tuple[FirstToken, ...]
    last_feature: bytes
    bytes: int
    seconds: float
    path: str


class PullDestination(Protocol):
    """Receives pulled pages. `owner` is the object that was passed to `PullManager.open`."""

    def first(self, owners: list[Hashable]) -> Hashable:
        """The owner that is lent pages first; `owners` are in order of arrival."""
        ...

    def lend(self, owner: Hashable, handle: KvHandle) -> tuple[list[int], int] | None:
        """Lends pages for all rows of `handle`; returns them and the number of leading pages that are already
        filled, or None if there are too few.
        """
        ...

    def refused(self, owner: Hashable, handle: KvHandle, now: float) -> None:
        """Called for the first owner if it was lent no pages; may cancel its pull, or another one."""
        ...

    def arrived(self, owner: Hashable, arrival: PullArrival) -> None:
        """Called when the pull has succeeded: `owner` owns the pages of `arrival` now."""
        ...

    def lost(self, owner: Hashable, error: EyasError) -> None:
        """Called when the pull has failed. Pages lent to it are returned by `pages_free`."""
        ...

    def pages_free(self, pages: list[int]) -> None:
        """Receives the pages of a failed pull: no copy writes to them any more."""
        ...


@dataclass
class _RunningPull:
    number: int
    owner: Hashable
    pull: PullAttempt
    handle: KvHandle
    attempt: int
    pages: list[int] = field(default_factory=list)
    approaches: dict[int, RouteTrial] = field(default_factory=dict)  # by the owner's rank
    peer: KvPeer | None = None  # the owner's record, once its pages are described


@dataclass
class PullManager:
    """All pulls of one group of pages. `wire` receives the front's reports of copies that it makes.

    `numbers`: pull numbers, unique per outbox. `peers`: the records of owners; if an owner's lease board is
    visible, the verdict is read from it. `groups`: of layers with separate pages; `state_pages`: pages of a
    sequence's state.
    """

    copier: PageCopier
    routes: PeerRoutes
    wire: FrontWire
    page_size: int
    outbox: EventOutbox
    numbers: Iterator[int]
    peers: KvPeers
    groups: KvGroups = ONE_GROUP
    state_pages: int = 0
    destination: PullDestination | None = None
    moved: dict[str, TransferTotals] = field(default_factory=dict)  # running totals by path
    pulled: dict[str, TransferTotals] = field(default_factory=dict)  # the same by owner
    failed: int = 0
    _active: dict[int, _RunningPull] = field(default_factory=dict)  # by number, in order of arrival

    def __post_init__(self) -> None:
        self.prober = LinkProber(self.copier, self.routes, self.peers, self.outbox, self.pulled)

    @property
    def active(self) -> int:
        """The number of pulls that have not ended, and of the probe."""
        return len(self._active) + self.prober.active

    def owners(self, *states: PullState) -> list[Hashable]:
        """Owners of the pulls in one of `states`, in order of arrival."""
        return [active.owner for active in self._active.values() if active.pull.state in states]

    def waiting(self) -> list[Any]:
        """Owners of the pulls that wait for pages."""
        return self.owners(PullState.WAITING)

    def whole(self) -> list[tuple[Any, tuple[FirstToken, ...]]]:
        """Owners of the pulls that wait for pages only, with the first tokens of their prompts, in order of
        arrival.
        """
        waiting = (a for a in self._active.values() if a.pull.state is PullState.WAITING)
        return [(a.owner, a.pull.whole) for a in waiting if a.pull.whole is not None]

    def coming(self) -> list[Any]:
        """Owners of the pulls that have pages."""
        return self.owners(PullState.PULLING, PullState.VALIDATING)

    def open(self, owner: Hashable, handle: KvHandle, attempt: int, deadline: float) -> None:
        """Queues a pull and opens its Watch, which keeps the lease alive while the pull waits.

        An invalid handle is reported by `lost` before this returns.
        """
        assert self.destination is not None
        number = next(self.numbers)
        try:
            if handle.tokens < 1:
                raise TransferFailed(f"KV handle {handle.id} must have rows.")
            order = handle_pages(self.groups, handle.tokens, self.page_size, self.state_pages)
            pull = PullAttempt(number, handle, attempt, self.page_size, deadline, order)
        except EyasError as error:
            self.destination.lost(owner, error)
            return
        self._active[number] = _RunningPull(number, owner, pull, handle, attempt)
        self._act(self._active[number])

    def refuse(self, handle: KvHandle, attempt: int) -> None:
        """Releases a handle that will not be pulled, so that its owner frees the pages."""
        self.outbox.add(ReleaseHandle(handle, attempt))

    def cancel(self, owner: Hashable) -> None:
        """Ends every pull of `owner`; its pages are returned once no copy writes to them."""
        now = time.monotonic()
        for active in [a for a in self._active.values() if a.owner == owner]:
            active.pull.cancel(now)
            self._act(active)

    def preempt(self, among: Callable[[Any], bool] = lambda owner: True) -> bool:
        """Takes the pages of the youngest running pull whose owner satisfies `among`; False if there is none.

        They are free immediately, or when the copies into them have stopped.
        """
        candidates = [a for a in self._active.values() if among(a.owner)]
        if any(a.pull.state is PullState.DRAINING for a in candidates):
            return True
        pulling = [a for a in candidates if a.pull.state is PullState.PULLING]
        if not pulling:
            return False
        pulling[-1].pull.preempt(time.monotonic())
        self._act(pulling[-1])
        return True

    def receive(self, command: PullReport) -> None:
        """Handles a report of the handle's owner, or of a copy that the front makes."""
        if isinstance(command, CopyStaged | CopyStopped):
            self.wire.receive(command)
            return
        active, now = self._active.get(command.pull), time.monotonic()
        if active is None:
            return
        match command:
            case PullMet():
                handle = active.handle
                self._met(active, self.peers.meet(handle.worker, handle.group, command.pool), now)
            case PullReady():
                active.pull.ready(command.tokens, now)
            case PullDone():
                active.pull.done(command.choices, command.last_feature, now)
            case PullFailed():
                active.pull.failed(command.failure.error(), now)
            case PullReleased():
                active.pull.released(command.valid, now)
        self._act(active)

    def poll(self, now: float) -> None:
        """Handles finished copies and deadlines, and lends pages to waiting pulls; called once per
        iteration.
        """
        assert self.destination is not None
        for result in self.copier.finished():
            if result.job.pull < 0:
                self.prober.copied(result, now)
                continue
            active = self._active[result.job.pull]  # a pull is not over while a copy of it runs
            for stopped in active.approaches[result.job.source.rank].stopped(result):
                active.pull.copied(stopped, now)
            self._act(active)
        self.prober.poll(now)
        for active in list(self._active.values()):
            active.pull.sweep(now)
            self._act(active)
        while owners := self.owners(PullState.WAITING):
            first = self.destination.first(owners)
            waits = (
                a for a in self._active.values() if a.owner == first and a.pull.state is PullState.WAITING
            )
            active = next(waits)
            lent = self.destination.lend(active.owner, active.handle)
            if lent is None:
                self.destination.refused(active.owner, active.handle, now)
                if active.pull.state is PullState.WAITING:
                    return  # the others wait behind it
                continue
            active.pages, filled = lent
            active.pull.start(tuple(active.pages), filled, now)
            self._act(active)

    def _act(self, active: _RunningPull) -> None:
        """Carries out the actions of the state machine; a failure may cause further ones."""
        while actions := active.pull.take_actions():
            for action in actions:
                self._do(active, action)
        if active.pull.state is PullState.DRAINING:
            for approach in active.approaches.values():
                approach.stop()
        if active.pull.over:
            self._active.pop(active.number, None)

    def _do(self, active: _RunningPull, action: Action) -> None:
        destination = self.destination
        assert destination is not None
        match action:
            case OpenWatch(handle, attempt):
                peer = self.peers.known(handle)
                self.outbox.add(OpenPull(active.number, handle, attempt, known=peer is not None))
                if peer is not None:
                    self._met(active, peer, time.monotonic())
            case CloseWatch():
                self.outbox.add(ClosePull(active.number))
            case AskVerdict():
                self._get_verdict(active)
            case SendRelease():
                self.outbox.add(ReleaseHandle(active.handle, active.attempt))
            case CopyJob():
                approach = active.approaches[action.source.rank]  # made when the owner's pages are described
                for stopped in approach.copy(action):
                    active.pull.copied(stopped, time.monotonic())
            case PagesFree(pages):
                destination.pages_free(list(pages))
            case PullIncomplete(error):
                self.failed += 1
                destination.lost(active.owner, error)
            case PullComplete():
                self._complete(active, action)

    def _complete(self, active: _RunningPull, complete: PullComplete) -> None:
        assert self.destination is not None
        for totals, key in ((self.moved, complete.path), (self.pulled, active.handle.worker)):
            totals[key] = totals.get(key, TransferTotals()).plus(complete.bytes, complete.seconds)
        arrival = PullArrival(
            handle=active.handle,
            pages=active.pages,
            first_tokens=complete.first_tokens,
            last_feature=complete.last_feature,
            bytes=complete.bytes,
            seconds=complete.seconds,
            path=complete.path,
        )
        self.destination.arrived(active.owner, arrival)

    def _met(self, active: _RunningPull, peer: KvPeer, now: float) -> None:
        """Begins to use the owner's described pages; the handle must list each of its ranks once."""
        handle, proofs = active.handle, itertools.count(-1, -1)
        ranks = [shard.rank for shard in handle.shards]
        if sorted(ranks) != sorted(rank.rank for rank in peer.pools[handle.group].ranks):
            text = f"KV handle {handle.id} has shards of ranks {ranks}, and its owner has others"
            active.pull.failed(TransferFailed(text), now)
            return
        active.peer = peer
        for rank in ranks:
            pages = peer.pages(handle.group, rank)
            active.approaches[rank] = RouteTrial(active.number, proofs, pages, self.routes, self.copier)

    def _get_verdict(self, active: _RunningPull) -> None:
        """Gets the verdict on the copied pages: from the owner's lease board if visible, else by a call."""
        board = None if active.peer is None else active.peer.board
        if board is None:
            self.outbox.add(ReleasePull(active.number))
            return
        valid = board.holds(active.handle.id)  # read before the release, after which the owner removes it
        self.outbox.add(ReleaseHandle(active.handle, active.attempt))
        active.pull.released(valid, time.monotonic())
