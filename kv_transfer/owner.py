"""The owner's half of the transfer protocol: leases on pages that another worker may read.

    filling ──finished──> ready ──release──> its end
       └─────────┴── lease ran out ──────────> its end
       └─────────┴── withdrawn ──────────────> its end

A pure state machine of all handles of one worker. It stores handles, times and watchers, and owns no bytes,
threads or connections. Every call passes `now` (monotonic seconds); a lease that has expired by then ends
before the call is handled, whether or not `sweep` ran in between.

An ended handle is dropped and its id is never reused, so later calls with it are stale and change nothing.
When a lease ends, only the lease's claim on the pages ends: the engine may still use them for a prompt that
is being computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eyas.common.errors import Cancelled, EyasError, TransferFailed
from eyas.common.types import FirstToken, KvHandle, KvKind, RankPages

HURRY_S = 3.0
"""The time after which a ready lease without a watcher ends when another request waits for its pages."""


@dataclass(frozen=True)
class PageOffer:
    """Pages about to be filled. `deadline` is the request's (monotonic seconds): no lease outlives it."""

    group: KvKind
    layout: str
    tokens: int
    shards: tuple[RankPages, ...]
    deadline: float


@dataclass(frozen=True)
class LeaseUpdate:
    """An update for the Watch `watch`: rows readable so far; then done, or `failure`, which ends it."""

    watch: int
    tokens: int = 0
    done: bool = False
    first_tokens: tuple[FirstToken, ...] = ()
    last_feature: bytes = b""
    failure: EyasError | None = None


@dataclass
class _PageLease:
    handle: KvHandle
    deadline: float
    expires: float
    readable: int = 0
    is_ready: bool = False  # False: its pages are being filled
    attempt: int = 0  # the highest seen
    watch: int | None = None
    left: float = 0.0  # when its last Watch closed, or it became ready
    first_tokens: tuple[FirstToken, ...] = ()
    last_feature: bytes = b""


class LeaseOwner:
    """All leases of one pool. `epoch` identifies the incarnation of the pool.

    Without an open Watch a lease lasts `lease_s` seconds, with one until the request's deadline. `new_id`
    returns unique ids below 2**63; ids that cannot be guessed limit access to the peers that received the
    handle.
    """

    def __init__(self, worker: str, epoch: int, lease_s: float, new_id: Callable[[], int]) -> None:
        self._worker = worker
        self._epoch = epoch
        self._lease_s = lease_s
        self._new_id = new_id
        self._leases: dict[int, _PageLease] = {}
        self._watched: dict[int, _PageLease] = {}  # by watch
        self._updates: dict[int, LeaseUpdate] = {}  # by watch: the newest update includes the older ones
        self._freed: list[int] = []

    @property
    def active(self) -> int:
        """The number of leases."""
        return len(self._leases)

    # --- called by the engine -------------------------------------------------------------------------

    def offer(self, offer: PageOffer, now: float) -> KvHandle:
        """Leases pages that are allocated but not yet filled; the handle may be sent to pullers
        immediately.
        """
        handle = KvHandle(
            worker=self._worker,
            epoch=self._epoch,
            attention_rank=0,  # one owner serves all attention ranks, with consecutive page numbers
            id=self._new_id(),
            group=offer.group,
            layout=offer.layout,
            tokens=offer.tokens,
            shards=offer.shards,
        )
        expires = min(now + self._lease_s, offer.deadline)
        self._leases[handle.id] = _PageLease(handle, offer.deadline, expires)
        return handle

    def filled(self, handle_id: int, tokens: int, now: float) -> None:
        """Marks the rows below `tokens` as readable: the device has written them."""
        lease = self._alive(handle_id, now)
        if lease is not None and tokens > lease.readable:
            lease.readable = tokens
            self._update_watch(lease)

    def finished(
        self, handle_id: int, first_tokens: tuple[FirstToken, ...], last_feature: bytes, now: float
    ) -> None:
        """FILLING -> READY: all rows are readable; adds the prompt's first tokens and last feature."""
        lease = self._alive(handle_id, now)
        if lease is not None:
            lease.is_ready, lease.readable = True, lease.handle.tokens
            lease.first_tokens, lease.last_feature, lease.left = first_tokens, last_feature, now
            self._update_watch(lease)

    def withdraw(self, handle_id: int, now: float, error: EyasError | None = None) -> None:
        """Ends a lease whose request failed on this worker with `error`; None: it was cancelled."""
        lease = self._alive(handle_id, now)
        if lease is not None:
            self._end(lease, error or Cancelled("The request was cancelled where its prompt ran."))

    # --- called for pullers --------------------------------------------------------------------------

    def watch_opened(self, watch: int, handle: KvHandle, attempt: int, now: float) -> None:
        """Opens a puller's Watch, which keeps the lease alive. Refuses a lower attempt than the highest seen;
        a higher one replaces the earlier Watch.

        `handle` must equal the offered one, including every page: the puller reads the pages that it lists.
        """
        lease = self._claimed(handle.id, handle.epoch, attempt, now)
        if lease is None or lease.handle != handle:
            self._updates[watch] = LeaseUpdate(watch, failure=_not_valid(handle.id))
            return
        self._detach_watch(lease, _not_valid(handle.id))
        lease.attempt, lease.watch, lease.expires = attempt, watch, lease.deadline
        self._watched[watch] = lease
        self._update_watch(lease)

    def watch_closed(self, watch: int, now: float) -> None:
        """Closes a Watch: unless another opens, the lease expires `lease_s` from now."""
        lease = self._watched.get(watch)
        if lease is not None and self._alive(lease.handle.id, now) is not None:
            self._detach_watch(lease, None)
            lease.expires, lease.left = min(now + self._lease_s, lease.deadline), now
        self._updates.pop(watch, None)

    def release(self, handle_id: int, epoch: int, attempt: int, now: float) -> bool:
        """Ends a lease for its puller. True if all pages were complete and leased while it read them.

        Before READY the lease ends as well, and the answer is False. A stale call (ended handle, other epoch,
        lower attempt) returns False and changes nothing.
        """
        lease = self._claimed(handle_id, epoch, attempt, now)
        if lease is None:
            return False
        valid = lease.is_ready
        superseded = _not_valid(handle_id) if attempt > lease.attempt else None
        self._end(lease, superseded)
        return valid

    # --- called once per step -------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Ends every expired lease."""
        for handle_id in list(self._leases):
            self._alive(handle_id, now)

    def hurry(self, now: float) -> None:
        """Ends leases that have been ready without a Watch for `HURRY_S`; called while a request waits for
        pages.

        A puller that received the handle opens its Watch sooner; the caller may have left before that.
        """
        for lease in list(self._leases.values()):
            if lease.is_ready and lease.watch is None and now >= lease.left + HURRY_S:
                self._end(lease, None)

    def take(self) -> tuple[list[LeaseUpdate], list[int]]:
        """The Watch updates since the last call, and the ids of leases that ended, each exactly once."""
        updates, freed = list(self._updates.values()), self._freed
        self._updates, self._freed = {}, []
        return updates, freed

    # --- inside ---------------------------------------------------------------------------------------

    def _alive(self, handle_id: int, now: float) -> _PageLease | None:
        lease = self._leases.get(handle_id)
        if lease is not None and now >= lease.expires:
            self._end(lease, TransferFailed(f"The lease of KV handle {handle_id} ran out."))
            return None
        return lease

    def _claimed(self, handle_id: int, epoch: int, attempt: int, now: float) -> _PageLease | None:
        lease = self._alive(handle_id, now)
        stale = lease is None or epoch != self._epoch or attempt < lease.attempt
        return None if stale else lease

    def _update_watch(self, lease: _PageLease) -> None:
        if lease.watch is not None:
            state = (lease.readable, lease.is_ready, lease.first_tokens, lease.last_feature)
            self._updates[lease.watch] = LeaseUpdate(lease.watch, *state)

    def _detach_watch(self, lease: _PageLease, failure: EyasError | None) -> None:
        """Detaches the lease from its Watch, which receives `failure`, if any, as its last update."""
        if lease.watch is not None:
            del self._watched[lease.watch]
            self._updates.pop(lease.watch, None)
            if failure is not None:
                self._updates[lease.watch] = LeaseUpdate(lease.watch, failure=failure)
            lease.watch = None

    def _end(self, lease: _PageLease, failure: EyasError | None) -> None:
        self._detach_watch(lease, failure)
        del self._leases[lease.handle.id]
        self._freed.append(lease.handle.id)


def _not_valid(handle_id: int) -> TransferFailed:
    return TransferFailed(
        f"KV handle {handle_id} is not valid: it ended, a later attempt holds it, or it was never offered."
    )
