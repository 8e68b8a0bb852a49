"""Cuts jobs into windows, for pages that pass through staging at their owner, at the puller, or at both.

Staging is bounded, so a long job passes through it window by window. AT_ONCE windows of a job are in flight,
each at another stage: copied into the owner's slots, transferred, or copied out of the puller's slots. When
slots are short, pulls take turns, so that a long prompt delays others by one window at most.
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
"""More than the three stages, since a window's messages take longer than its bytes. Windows whose bytes have
arrived, and that only wait for the owner's confirmation, do not count."""

PagePiece: TypeAlias = tuple[bytes, PageShare]
"""The bytes of some heads of a page, and which heads of the peer's rank they are."""


class LandingSlots(Protocol):
    """The puller's staging slots, from which pages are copied into a device's pool.

    The slots are in host memory or in the device's, as the backends' `site` says.
    """

    @property
    def total(self) -> int:
        """The number of all slots; 0 for a worker that never pulls."""
        ...

    @property
    def free(self) -> int:
        """The number of free slots."""
        ...

    def take(self, count: int) -> list[int] | None:
        """Takes `count` slots; None if there are too few."""
        ...

    def give(self, slots: Sequence[int]) -> None:
        """Returns slots that no copy uses any more."""
        ...

    def copy_in(self, slots: Sequence[int], pages: Sequence[int], then: Then, target: PageShare) -> None:
        """Copies slots to pages of a rank's pool, or to some heads of them; `poll` calls `then` at the
        end.
        """
        ...

    def piece(self, slot: int, target: PageShare) -> bytes:
        """The bytes in a slot that belong to a rank's pool."""
        ...

    def joined(self, pieces: Sequence[PagePiece]) -> bytes:
        """One page of a peer's rank, joined from all its pieces."""
        ...

    def poll(self) -> None:
        """Calls the callbacks of copies that have stopped."""
        ...

    def stop(self, deadline: float) -> bool:
        """Ends the copies; False if one still runs at `deadline` (monotonic seconds)."""
        ...


@dataclass(eq=False)
class WindowedJob:
    """A job that runs by `route`. Times are monotonic seconds.

    `windows`: not begun yet. `lands`: whether its windows take landing slots. Counts of windows: `begun`,
    those of them still `running`, and those of these whose bytes have arrived (`crossed`). `pieces`: of a
    proof page.
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
        """Whether windows are still to be begun."""
        return bool(self.windows) and self.error is None

    @property
    def ready(self) -> bool:
        """Whether the next window may begin. Each of our ranks has windows of its own, which are smaller."""
        return self.left and self.running - self.crossed < AT_ONCE * len(self.route.parts)

    @property
    def count(self) -> int:
        """The number of pages of the next window."""
        return len(self.windows[0].dst_pages)

    @property
    def slots(self) -> int:
        """The number of landing slots of the next window."""
        return slots_for(self.count, self.windows[0].part.here)

    def next(self) -> CopyJob:
        """Begins the next window."""
        self.begun += 1
        self.running += 1
        return self.windows.popleft()

    def stopped(self, result: CopyResult, error: EyasError | None) -> None:
        """Records a stopped window: `result` of the transfer, `error` of the transfer or the copy behind
        it.
        """
        self.running -= 1
        self.bytes += result.bytes
        self.seconds += result.seconds
        self.error = self.error or error

    def result(self, now: float) -> CopyResult:
        """The result of all, once nothing runs or is left. Windows overlap, so their seconds are no sum."""
        seconds = now - self.began if self.begun > 1 else self.seconds
        return CopyResult(self.job, self.route.backend.name, self.bytes, seconds, self.error)


def cut(route: PeerRoute, job: CopyJob, size: int) -> Iterator[CopyJob]:
    """The windows of a job, each of `size` slots at most: a range of pages for each rank, then the next
    range.
    """
    size = min((min(part.window, size * part.here) for part in route.parts), default=size)
    for first in range(0, len(job.dst_pages), size):
        pages = slice(first, first + size)
        source = RankPages(job.source.rank, job.source.pages[pages])
        for part in route.parts:
            yield replace(job, source=source, dst_pages=job.dst_pages[pages], part=part)


@dataclass
class PullTurns:
    """Orders the jobs whose windows take slots: the pull with the fewest windows in flight is next, among
    equals the one that has waited longest. The jobs of one pull run in order.
    """

    _pulls: dict[int, list[WindowedJob]] = field(default_factory=dict)  # the next turn first

    def add(self, job: WindowedJob) -> None:
        """Adds a job behind those of its pull; a new pull comes last."""
        self._pulls.setdefault(job.job.pull, []).append(job)

    def next(self, allowed: Callable[[WindowedJob], bool]) -> WindowedJob | None:
        """The job whose window begins next, among those that are `allowed`; None if there is none."""
        first = {pull: next((job for job in jobs if job.ready), None) for pull, jobs in self._pulls.items()}
        ready = [pull for pull, job in first.items() if job is not None and allowed(job)]
        fewest = min(ready, key=lambda pull: sum(job.running for job in self._pulls[pull]), default=None)
        return None if fewest is None else first[fewest]

    def taken(self, job: WindowedJob) -> None:
        """Records that the job has begun a window, which puts its pull last."""
        self._pulls[job.job.pull] = self._pulls.pop(job.job.pull)

    def drop(self, job: WindowedJob) -> None:
        """Removes a job."""
        jobs = self._pulls[job.job.pull]
        jobs.remove(job)
        if not jobs:
            del self._pulls[job.job.pull]
