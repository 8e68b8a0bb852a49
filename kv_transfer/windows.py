"""Jobs cut into windows, for pages that pass through staging: at their owner's, at ours, or at both.

Staging is bounded, so a long job passes through it window by window. AT_ONCE windows of a job are on their
way at a time, in different places: one is copied into its owner's slots, one crosses, one is copied out of
ours. Where slots are short, pulls take turns, so that a long prompt delays no other by more than a window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from eyas.common.errors import EyasError
from eyas.common.types import PageShare, RankPages
from kv_transfer.backends.base import CopyJob, CopyResult
from kv_transfer.copy_threads import Then
from kv_transfer.layout import slots_for
from kv_transfer.peers import PeerRoute

AT_ONCE = 4
"""More than the three places: a window's messages take longer than its bytes. Those that have crossed, and
wait for their owner's word alone, do not count."""

PagePiece: TypeAlias = tuple[bytes, PageShare]
"""Some heads of a page, and which of the peer's rank they are."""


class LandingSlots(Protocol):
    """Staging of our own beside a device's pool: pages land in its slots, and go on into the pool from there.

    In host memory or in the device's: that is the backends' business, whose `site.area` has these slots.
    """

    @property
    def total(self) -> int:
        """The number of all slots; a worker that only computes prompts for others has none."""
        ...

    @property
    def free(self) -> int:
        """The number of those that are not taken."""
        ...

    def take(self, count: int) -> list[int] | None:
        """Takes `count` slots; None: not now."""
        ...

    def give(self, slots: Sequence[int]) -> None:
        """Takes slots back, in which nothing is copied any more."""
        ...

    def copy_in(self, slots: Sequence[int], pages: Sequence[int], then: Then, target: PageShare) -> None:
        """Copies slots to pages of a rank's pool, or to some heads of them; `poll` calls `then` when that has
        stopped.
        """
        ...

    def piece(self, slot: int, target: PageShare) -> bytes:
        """The bytes that have come to a slot for a rank's pool."""
        ...

    def joined(self, pieces: Sequence[PagePiece]) -> bytes:
        """One page of a peer's rank, of all its pieces."""
        ...

    def poll(self) -> None:
        """Tells of the copies that have stopped."""
        ...

    def stop(self, deadline: float) -> bool:
        """Ends the copies; False if one still runs at `deadline` (monotonic seconds)."""
        ...


@dataclass(eq=False)
class WindowedJob:
    """A job that goes by `route` in `windows`, those that were not begun. Times are monotonic seconds.

    `lands`: its windows take slots of ours. `begun`: windows; `running`: those of them that have not stopped;
    `crossed`: those of these whose bytes have come.
    `pieces`: of a proof page, as they came.
    """

    route: PeerRoute
    job: CopyJob
    windows: deque[CopyJob]
    lands: bool
    began: float
    begun: int = 0
    running: int = 0
    crossed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    pieces: list[PagePiece] = field(default_factory=list)
    error: EyasError | None = None

    @property
    def left(self) -> bool:
        """Whether a window was not begun, and should be."""
        return bool(self.windows) and self.error is None

    @property
    def ready(self) -> bool:
        """Whether its next window may begin. (Each of our ranks has its own, which are smaller.)"""
        return self.left and self.running - self.crossed < AT_ONCE * len(self.route.parts)

    @property
    def count(self) -> int:
        """Pages of its next window."""
        return len(self.windows[0].dst_pages)

    @property
    def slots(self) -> int:
        """Slots of ours that these take."""
        return slots_for(self.count, self.windows[0].part.here)

    def next(self) -> CopyJob:
        """Begins its next window, whose pages are those of the job."""
        self.begun += 1
        self.running += 1
        return self.windows.popleft()

    def stopped(self, result: CopyResult, error: EyasError | None) -> None:
        """A window has stopped: `result` of its way here, `error` of all of it."""
        self.running -= 1
        self.bytes += result.bytes
        self.seconds += result.seconds
        self.error = self.error or error

    def result(self, now: float) -> CopyResult:
        """The result of all, once nothing runs or is left. Windows overlap, so their seconds are no sum."""
        seconds = now - self.began if self.begun > 1 else self.seconds
        return CopyResult(self.job, self.route.backend.name, self.bytes, seconds, self.error)


def cut(route: PeerRoute, job: CopyJob, size: int) -> Iterator[CopyJob]:
    """The windows of a job, each in `size` slots at most: the same pages for each rank, then the next."""
    size = min((min(part.window, size * part.here) for part in route.parts), default=size)
    for first in range(0, len(job.dst_pages), size):
        pages = slice(first, first + size)
        source = RankPages(job.source.rank, job.source.pages[pages])
        for part in route.parts:
            yield replace(job, source=source, dst_pages=job.dst_pages[pages], part=part)


@dataclass
class PullTurns:
    """Jobs whose windows take slots. The pull with the fewest on their way is next, and among such the one
    that waits longest; the jobs of each go in order.
    """

    _pulls: dict[int, list[WindowedJob]] = field(default_factory=dict)  # the next turn first

    def add(self, job: WindowedJob) -> None:
        """Joins the jobs of its pull, or comes behind all other pulls."""
        self._pulls.setdefault(job.job.pull, []).append(job)

    def next(self, allowed: Callable[[WindowedJob], bool]) -> WindowedJob | None:
        """The job whose window should be the next to begin, of those that are `allowed` to."""
        first = {pull: next((job for job in jobs if job.ready), None) for pull, jobs in self._pulls.items()}
        ready = [pull for pull, job in first.items() if job is not None and allowed(job)]
        fewest = min(ready, key=lambda pull: sum(job.running for job in self._pulls[pull]), default=None)
        return None if fewest is None else first[fewest]

    def taken(self, job: WindowedJob) -> None:
        """It has begun a window: its pull has waited least now."""
        self._pulls[job.job.pull] = self._pulls.pop(job.job.pull)

    def drop(self, job: WindowedJob) -> None:
        """It begins no more."""
        jobs = self._pulls[job.job.pull]
        jobs.remove(job)
        if not jobs:
            del self._pulls[job.job.pull]
