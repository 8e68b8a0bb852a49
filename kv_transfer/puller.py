"""The puller's half of the transfer protocol: turns a KV handle into valid local pages, or into an error.

    WAITING ───start──> PULLING ───all copied──> VALIDATING ──valid──> COMPLETE
       ^                   │                         │
       │ preempted         │ preempted, failed,      │ not valid, late
       │                   v cancelled, late         v
       └──────────────  DRAINING ──copies stopped─> FAILED

A pure state machine of one handle and one attempt, for all shards of the handle. It is called with events,
and returns the actions to carry out (`take_actions`); it stores page numbers and times, and owns no bytes,
threads or connections. Every call passes `now` (monotonic seconds). Every state has a deadline, which is
enforced before a later event is handled.

Copied pages count only after the owner's verdict "valid". Destination pages are lent by `start` and returned
by `PagesFree`, never before the last copy into them has stopped: no timeout makes memory safe to reuse while
something may still write to it.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TypeAlias

from eyas.common.errors import ConfigError, EyasError, TransferFailed
from eyas.common.types import FirstToken, KvHandle, RankPages
from kv_transfer.backends.base import CopyJob, CopyResult
from kv_transfer.layout import HandlePages, pages_for

RELEASE_S = 5.0  # an owner that has not answered Release within this time is considered dead
DRAIN_S = 10.0  # a copy that has not stopped within this time ends the attempt; its pages stay lent


class PullState(enum.StrEnum):
    """The state of an attempt; the module's docstring shows the transitions."""

    WAITING = "waiting"  # for destination pages; the Watch is open and holds the lease
    PULLING = "pulling"
    DRAINING = "draining"  # nothing more is copied, but copies still run
    VALIDATING = "validating"
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(frozen=True)
class OpenWatch:
    """Open a Watch of the handle at its owner, for this attempt."""

    handle: KvHandle
    attempt: int


@dataclass(frozen=True)
class CloseWatch:
    """Close the Watch: the attempt is decided."""


@dataclass(frozen=True)
class AskVerdict:
    """Release the owner's pages, which have been read, and ask for its verdict; `released` receives it."""


@dataclass(frozen=True)
class SendRelease:
    """Release the owner's pages, which are no longer needed. There is no answer."""


@dataclass(frozen=True)
class PullComplete:
    """The pages hold the prompt's KV. `seconds` since `start`; `path` is the backend that moved `bytes`."""

    first_tokens: tuple[FirstToken, ...]
    last_feature: bytes
    bytes: int
    seconds: float
    path: str


@dataclass(frozen=True)
class PullIncomplete:
    """The attempt has failed. Reported immediately, even while copies still run."""

    error: EyasError


@dataclass(frozen=True)
class PagesFree:
    """Return all pages of the last `start`: nothing writes to them any more."""

    pages: tuple[int, ...]


Action: TypeAlias = (
    OpenWatch | CloseWatch | AskVerdict | SendRelease | CopyJob | PullComplete | PullIncomplete | PagesFree
)


@dataclass
class _PageLoan:
    """Destination pages, from `start` until they are complete or free."""

    pages: tuple[int, ...]
    since: float
    copied_to: int  # pages below it are cached, copied, or being copied
    running: set[int] = field(default_factory=set)  # numbers of the copies that have not stopped
    bytes: int = 0
    path: str = ""


class PullAttempt:
    """One attempt to pull one handle.

    `number` identifies the attempt in copy jobs; `deadline` is the request's. `pages`: how the handle's pages
    are ordered (None: all are). Raises ConfigError if the handle's shards cannot hold its tokens.
    """

    def __init__(
        self,
        number: int,
        handle: KvHandle,
        attempt: int,
        page_size: int,
        deadline: float,
        pages: HandlePages | None = None,
    ) -> None:
        self.state = PullState.WAITING
        self._number = number
        self._handle = handle
        self._page_size = page_size
        self._pages = pages or HandlePages(pages_for(handle.tokens, page_size))
        self._page_count = sum(self._pages)
        self._deadline = deadline
        self._expires = deadline  # of the present state
        self._decided = False  # completed, failed or cancelled: the final actions were issued
        self._readable = 0  # source rows
        self._answer: tuple[tuple[FirstToken, ...], bytes] | None = None  # of `done`
        self._loan: _PageLoan | None = None
        self._copies = 0
        self._actions: list[Action] = [OpenWatch(handle, attempt)]
        if not handle.shards:
            raise ConfigError(f"KV handle {handle.id} lists no shard.")
        for shard in handle.shards:
            if len(shard.pages) != self._page_count:
                raise ConfigError(
                    f"KV handle {handle.id} lists {len(shard.pages)} pages for rank {shard.rank}, "
                    f"but {handle.tokens} rows take {self._page_count} pages of {page_size}."
                )

    @property
    def over(self) -> bool:
        """Whether the attempt is decided and owns no pages: it may be dropped once its actions are taken."""
        return self.state in (PullState.COMPLETE, PullState.FAILED) and self._loan is None

    @property
    def whole(self) -> tuple[FirstToken, ...] | None:
        """The prompt's first tokens, once the owner has computed all rows; None before."""
        return None if self._answer is None else self._answer[0]

    def take_actions(self) -> list[Action]:
        """Returns the actions since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    # --- what the engine decides ----------------------------------------------------------------------

    def start(self, dst_pages: tuple[int, ...], skip: int, now: float) -> None:
        """WAITING -> PULLING, into the pages of the whole prompt, the first `skip` of which are cached."""
        assert self.state is PullState.WAITING and len(dst_pages) == self._page_count
        self._enter(PullState.PULLING, self._deadline)
        self._loan = _PageLoan(dst_pages, now, copied_to=skip)
        self._advance(self._loan, now)

    def preempt(self, now: float) -> None:
        """Returns the pages and waits for others. Only in PULLING: later the source may be gone."""
        self.sweep(now)
        if self.state is PullState.PULLING:
            self._enter(PullState.DRAINING, now + DRAIN_S)
            self._finish_draining()

    def cancel(self, now: float) -> None:
        """Ends the attempt: the request needs no pages any more."""
        if not self._decided:
            self._give_up(now)

    # --- events of the Watch --------------------------------------------------------------------------

    def ready(self, tokens: int, now: float) -> None:
        """The owner's rows below `tokens` may be read."""
        self.sweep(now)
        self._readable = tokens
        if self._loan is not None:
            self._advance(self._loan, now)

    def done(self, first_tokens: tuple[FirstToken, ...], last_feature: bytes, now: float) -> None:
        """All of the owner's rows may be read, the last page's too."""
        self.sweep(now)
        self._answer = (first_tokens, last_feature)
        if self._loan is not None:
            self._advance(self._loan, now)

    def failed(self, error: EyasError, now: float) -> None:
        """The Watch broke, or the owner reported a failure. In VALIDATING only the verdict counts."""
        self.sweep(now)
        if not self._decided and self.state is not PullState.VALIDATING:
            self._fail(error, now)

    def released(self, valid: bool, now: float) -> None:
        """The owner's answer to `AskVerdict`."""
        self.sweep(now)
        if self.state is not PullState.VALIDATING:
            return
        if not valid:
            self._fail(TransferFailed(f"KV handle {self._handle.id} lapsed while it was read."), now)
            return
        assert self._loan is not None and self._answer is not None
        loan, self._loan = self._loan, None
        self._decided = True
        self._enter(PullState.COMPLETE, math.inf)
        complete = PullComplete(*self._answer, loan.bytes, now - loan.since, loan.path)
        self._actions += [CloseWatch(), complete]

    # --- events of the copier and the clock -----------------------------------------------------------

    def copied(self, result: CopyResult, now: float) -> None:
        """A copy has stopped, with or without an error."""
        self.sweep(now)
        loan = self._loan
        if loan is None or result.job.number not in loan.running:
            return
        loan.running.remove(result.job.number)
        if self.state is not PullState.PULLING:
            self._finish_draining()
        elif result.error is not None:
            self._fail(result.error, now)
        else:
            loan.bytes += result.bytes
            loan.path = result.path
            self._advance(loan, now)

    def sweep(self, now: float) -> None:
        """Enforces the deadline of the present state."""
        if now < self._expires:
            return
        state = self.state
        if not self._decided:
            self._fail(TransferFailed(f"KV handle {self._handle.id} was still {state} at its deadline."), now)
        if state is PullState.DRAINING:  # a stuck copy may hold its pages, but not the attempt
            self._enter(PullState.FAILED, math.inf)

    # --- inside ---------------------------------------------------------------------------------------

    def _enter(self, state: PullState, expires: float) -> None:
        self.state, self._expires = state, expires

    def _advance(self, loan: _PageLoan, now: float) -> None:
        """Copies every page that became final; asks for the owner's verdict once all are copied."""
        if self.state is not PullState.PULLING:
            return
        done = self._answer is not None
        final = self._page_count if done else min(self._readable // self._page_size, self._pages.ordered)
        if final > loan.copied_to:
            for shard in self._handle.shards:
                self._copy(shard, loan, final)
            loan.copied_to = final
        if done and not loan.running:
            self._enter(PullState.VALIDATING, min(now + RELEASE_S, self._deadline))
            self._actions.append(AskVerdict())

    def _copy(self, shard: RankPages, loan: _PageLoan, final: int) -> None:
        source = RankPages(shard.rank, shard.pages[loan.copied_to : final])
        job = CopyJob(self._number, self._copies, source, loan.pages[loan.copied_to : final])
        self._copies += 1
        loan.running.add(job.number)
        self._actions.append(job)

    def _fail(self, error: EyasError, now: float) -> None:
        self._actions.append(PullIncomplete(error))
        self._give_up(now)

    def _give_up(self, now: float) -> None:
        """Releases the owner's pages now, instead of when the lease expires, and drains."""
        if self.state is not PullState.VALIDATING:  # AskVerdict has released them
            self._actions.append(SendRelease())
        self._actions.append(CloseWatch())
        self._decided = True
        self._enter(PullState.DRAINING, now + DRAIN_S)
        self._finish_draining()

    def _finish_draining(self) -> None:
        """Returns the pages and leaves DRAINING, if no copy runs."""
        if self._loan is not None and not self._loan.running:
            self._actions.append(PagesFree(self._loan.pages))
            self._loan = None
        if self._loan is None and self.state is PullState.DRAINING:
            after = (PullState.FAILED, math.inf) if self._decided else (PullState.WAITING, self._deadline)
            self._enter(*after)
