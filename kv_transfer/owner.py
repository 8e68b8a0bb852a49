"""The owner's half of the transfer protocol: leases on pages that another worker may read.

    filling ──finished──> ready ──release──> its end
       └─────────┴── lease ran out ──────────> its end
       └─────────┴── withdrawn ──────────────> its end

A pure state machine of all handles of one worker. It holds handles, times and who watches; never bytes,
threads or the wire. Every call brings `now` (monotonic seconds), and a lease that has run out by then is over
before the call is looked at, whether or not anyone swept in between.

An ended handle is forgotten and its id never used again: whatever refers to it is stale, and stale calls
change nothing. That its pages are free means that the *lease's* claim ended; a prompt still being
computed keeps its own claim, which is the engine's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eyas.common.errors import Cancelled, EyasError, TransferFailed
from eyas.common.types import FirstToken, KvHandle, KvKind, RankPages

HURRY_S = 3.0


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
    is_ready: bool = False  # else its pages are being filled
    attempt: int = 0  # the highest one seen
    watch: int | None = None
    left: float = 0.0  # since when nobody watches what is ready
    first_tokens: tuple[FirstToken, ...] = ()
    last_feature: bytes = b""


class LeaseOwner:
    """All leases of one pool. `epoch` names the pool's incarnation; without an open Watch a lease lasts
    `lease_s` seconds, with one it lasts until the request's deadline. `new_id` gives ids below 2**63, each
    once; where they cannot be guessed, only those who were given a handle reach its pages.
    """

    def __init__(self, worker: str, epoch: int, lease_s: float, new_id: Callable[[], int]) -> None:
        self._worker = worker
        self._epoch = epoch
        self._lease_s = lease_s
        self._new_id = new_id
        self._leases: dict[int, _PageLease] = {}
        self._watched: dict[int, _PageLease] = {}  # by watch
        self._updates: dict[int, LeaseUpdate] = {}  # by watch: the newest word contains the older ones
        self._freed: list[int] = []

    @property
    def active(self) -> int:
        """How many handles still claim their pages."""
        return len(self._leases)

    # --- the engine's side: what happens to the pages -------------------------------------------------

    def offer(self, offer: PageOffer, now: float) -> KvHandle:
        """Lease pages that are allocated but not yet filled; the handle may be given away at once."""
        handle = KvHandle(
            worker=self._worker,
            epoch=self._epoch,
            attention_rank=0,  # one owner serves all attention ranks, whose pages are numbered on
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
        """Rows below `tokens` may be read (their writes are past their device event)."""
        lease = self._alive(handle_id, now)
        if lease is not None and tokens > lease.readable:
            lease.readable = tokens
            self._tell(lease)

    def finished(
        self, handle_id: int, first_tokens: tuple[FirstToken, ...], last_feature: bytes, now: float
    ) -> None:
        """Every row may be read, and this is what the prompt gave besides. FILLING -> READY."""
        lease = self._alive(handle_id, now)
        if lease is not None:
            lease.is_ready, lease.readable = True, lease.handle.tokens
            lease.first_tokens, lease.last_feature, lease.left = first_tokens, last_feature, now
            self._tell(lease)

    def withdraw(self, handle_id: int, now: float, error: EyasError | None = None) -> None:
        """The request failed on this side with `error`; None: it was cancelled."""
        lease = self._alive(handle_id, now)
        if lease is not None:
            self._end(lease, error or Cancelled("The request was cancelled where its prompt ran."))

    # --- the puller's side: its readers --------------------------------------------------------------

    def watch_opened(self, watch: int, handle: KvHandle, attempt: int, now: float) -> None:
        """A puller listens and so holds the lease. A lower attempt is refused, a higher one takes over.

        `handle` must be what was offered, to the last page: the puller reads what it names.
        """
        lease = self._claimed(handle.id, handle.epoch, attempt, now)
        if lease is None or lease.handle != handle:
            self._updates[watch] = LeaseUpdate(watch, failure=_not_valid(handle.id))
            return
        self._hang_up(lease, _not_valid(handle.id))
        lease.attempt, lease.watch, lease.expires = attempt, watch, lease.deadline
        self._watched[watch] = lease
        self._tell(lease)

    def watch_closed(self, watch: int, now: float) -> None:
        """The heartbeat stops: unless another Watch comes, the lease runs out `lease_s` from now."""
        lease = self._watched.get(watch)
        if lease is not None and self._alive(lease.handle.id, now) is not None:
            self._hang_up(lease, None)
            lease.expires, lease.left = min(now + self._lease_s, lease.deadline), now
        self._updates.pop(watch, None)

    def release(self, handle_id: int, epoch: int, attempt: int, now: float) -> bool:
        """The puller wants nothing more. True: all it read was complete and leased all the time.

        Before READY it means that no worker will pull: the claim ends at once, and the answer is False.
        A stale call (ended handle, other epoch, lower attempt) is False and changes nothing.
        """
        lease = self._claimed(handle_id, epoch, attempt, now)
        if lease is None:
            return False
        valid = lease.is_ready
        superseded = _not_valid(handle_id) if attempt > lease.attempt else None
        self._end(lease, superseded)
        return valid

    # --- the loop's side: once a step -----------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """End every lease that has run out."""
        for handle_id in list(self._leases):
            self._alive(handle_id, now)

    def hurry(self, now: float) -> None:
        """Somebody waits for the pages: what has been ready for `HURRY_S`, and nobody watches, ends. A puller
        that has heard of it comes sooner; its caller may have left before it heard.
        """
        for lease in list(self._leases.values()):
            if lease.is_ready and lease.watch is None and now >= lease.left + HURRY_S:
                self._end(lease, None)

    def take(self) -> tuple[list[LeaseUpdate], list[int]]:
        """Returns the updates for Watches since the last call, and the ids whose pages are free, each exactly
        once.
        """
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

    def _tell(self, lease: _PageLease) -> None:
        if lease.watch is not None:
            words = (lease.readable, lease.is_ready, lease.first_tokens, lease.last_feature)
            self._updates[lease.watch] = LeaseUpdate(lease.watch, *words)

    def _hang_up(self, lease: _PageLease, failure: EyasError | None) -> None:
        """Part the lease from its Watch, with a last word to it if there is a `failure`."""
        if lease.watch is not None:
            del self._watched[lease.watch]
            self._updates.pop(lease.watch, None)
            if failure is not None:
                self._updates[lease.watch] = LeaseUpdate(lease.watch, failure=failure)
            lease.watch = None

    def _end(self, lease: _PageLease, failure: EyasError | None) -> None:
        self._hang_up(lease, failure)
        del self._leases[lease.handle.id]
        self._freed.append(lease.handle.id)


def _not_valid(handle_id: int) -> TransferFailed:
    return TransferFailed(
        f"KV handle {handle_id} is not valid: it ended, a later attempt holds it, or it was never offered."
    )
