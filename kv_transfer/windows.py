"""Jobs cut into windows, for pages that pass through staging: at their owner's, at ours, or at both.

Staging is bounded, so a long job passes through it window by window. AT_ONCE windows of a job are on their
way at a time, in different places: one is copied into its owner's slots, one crosses, one is copied out of
ours. Where slots are short, pulls take turns, so that a long prompt delays no other by more than a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from eyas.common.errors import EyasError
from eyas.common.types import RankPages
from kv_transfer.backends.base import CopyJob, CopyResult
from kv_transfer.copy_thread import Then
from kv_transfer.peers import PeerRoute

AT_ONCE = 3


class LandingSlots(Protocol):
    """Staging of our own beside a device's pool: pages land in its slots, and go on into the pool from there.

    In host memory or in the device's: that is the backends' business, whose `site.area` has these slots.
    """

    def take(self, count: int) -> list[int] | None:
        """Takes `count` slots; None: not now."""
        ...

    def give(self, slots: Sequence[int]) -> None:
        """Takes slots back, in which nothing is copied any more."""
        ...

    def copy_in(self, slots: Sequence[int], pages: Sequence[int], then: Then) -> None:
        """Copies slots to pages of the pool; `poll` calls `then` when that has stopped."""
        ...

    def poll(self) -> None:
        """Tells of the copies that have stopped."""
        ...

    def stop(self, deadline: float) -> bool:
        """Ends the copies; False if one still runs at `deadline` (monotonic seconds)."""
        ...


@dataclass(eq=False)
class WindowedJob:
    """A job that goes by `route` in windows of at most `size` pages. Times are monotonic seconds.

    `lands`: its windows take slots of ours. `started`: pages that a window was begun for; `windows`: how many
    were begun; `running`: those that have not stopped.
    """

    route: PeerRoute
    job: CopyJob
    size: int
    lands: bool
    began: float
    started: int = 0
    windows: int = 0
    running: int = 0
    bytes: int = 0
    seconds: float = 0.0
    path: str = ""
    error: EyasError | None = None

    @property
    def left(self) -> int:
        """The number of pages that no window was begun for, and one should."""
        return 0 if self.error else len(self.job.dst_pages) - self.started

    @property
    def ready(self) -> bool:
        """Whether its next window may begin."""
        return self.left > 0 and self.running < AT_ONCE

    @property
    def count(self) -> int:
        """Pages of its next window."""
        return min(self.left, self.size)

    def next(self) -> CopyJob:
        """Begins its next window, whose pages are those of the job."""
        pages, job = slice(self.started, self.started + self.count), self.job
        self.started += self.count
        self.windows += 1
        self.running += 1
        source = RankPages(job.source.rank, job.source.pages[pages])
        return replace(job, source=source, dst_pages=job.dst_pages[pages])

    def stopped(self, result: CopyResult, error: EyasError | None) -> None:
        """A window has stopped: `result` of its way here, `error` of all of it."""
        self.running -= 1
        self.bytes += result.bytes
        self.seconds += result.seconds
        self.path = result.path
        self.error = self.error or error

    def result(self, now: float) -> CopyResult:
        """The result of all, once nothing runs or is left. Windows overlap, so their seconds are no sum."""
        seconds = now - self.began if self.windows > 1 else self.seconds
        return CopyResult(self.job, self.path, self.bytes, seconds, self.error)


@dataclass
class PullTurns:
    """Jobs whose windows take slots. The pull with the fewest on their way is next, and among such the one
    that waits longest; the jobs of each go in order.
    """

    _pulls: dict[int, list[WindowedJob]] = field(default_factory=dict)  # the next turn first

    def add(self, job: WindowedJob) -> None:
        """Joins the jobs of its pull, or comes behind all other pulls."""
        self._pulls.setdefault(job.job.pull, []).append(job)

    def next(self) -> WindowedJob | None:
        """The job whose window should be the next to begin."""
        ready = [jobs for jobs in self._pulls.values() if any(job.ready for job in jobs)]
        fewest = min(ready, key=lambda jobs: sum(job.running for job in jobs), default=[])
        return next((job for job in fewest if job.ready), None)

    def taken(self, job: WindowedJob) -> None:
        """It has begun a window: its pull has waited least now."""
        self._pulls[job.job.pull] = self._pulls.pop(job.job.pull)

    def drop(self, job: WindowedJob) -> None:
        """It begins no more."""
        jobs = self._pulls[job.job.pull]
        jobs.remove(job)
        if not jobs:
            del self._pulls[job.job.pull]
