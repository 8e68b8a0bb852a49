"""Copies into a device's pool: they land in staging slots and go on from there, and only then count.

A long job passes through the slots window by window. What a backend does until the bytes are in a slot is
the `PageCopier`'s business; a direct one needs no slots.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from eyas.common.errors import Cancelled, EyasError
from eyas.common.types import RankPages
from eyas.engine.kv.slots import SlotAllocator
from eyas.engine.kv.staging import PageStaging
from kv_transfer.backends.base import CopyJob, CopyResult, TransferBackend
from kv_transfer.copier import PageCopier
from kv_transfer.peers import PeerRoute

AT_ONCE = 2  # windows of one job: while one is copied from its slots, the next one comes


@dataclass(frozen=True)
class StagingInlet:
    """The entry of pages: slots of the staging, at most `window` of them for one copy."""

    staging: PageStaging
    slots: SlotAllocator
    window: int


@dataclass(eq=False)
class _StagedJob:
    """A job. `started`: its pages that a window was begun for; `running`: its windows that have not
    landed."""

    route: PeerRoute
    job: CopyJob
    started: int = 0
    running: int = 0
    bytes: int = 0
    seconds: float = 0.0
    path: str = ""
    error: EyasError | None = None

    @property
    def left(self) -> int:
        """The number of pages that no window was begun for, and one should."""
        return 0 if self.error else len(self.job.dst_pages) - self.started

    def next(self, count: int) -> CopyJob:
        """The next window, still with pages of the pool."""
        pages, job = slice(self.started, self.started + count), self.job
        self.started += count
        source = RankPages(job.source.rank, job.source.pages[pages])
        return replace(job, source=source, dst_pages=job.dst_pages[pages])


class StagedCopier(PageCopier):
    """A `PageCopier` whose jobs name pages of the device's pool. Jobs take turns, window by window."""

    def __init__(self, backends: Mapping[str, TransferBackend], inlet: StagingInlet) -> None:
        super().__init__(backends)
        self._inlet = inlet
        self._landings: list[_StagedJob] = []
        self._queue: deque[_StagedJob] = deque()  # those whose next window waits for slots
        self._numbers = itertools.count()  # of windows
        self._windows: dict[
            int, tuple[_StagedJob, CopyJob, list[int]]
        ] = {}  # by number: for which pages, slots
        self._over: list[CopyResult] = []

    def submit(self, route: PeerRoute, job: CopyJob) -> None:
        landing = _StagedJob(route, job)
        self._landings.append(landing)
        if route.backend.direct:
            self._start(landing, len(job.dst_pages), [])
        else:
            self._queue.append(landing)
            self._begin()

    def cancel(self, pull: int) -> None:
        for landing in [landing for landing in self._landings if landing.job.pull == pull]:
            if landing.left:
                landing.error = Cancelled("the copy was given up")
            self._settle(landing)
        super().cancel(pull)
        self._begin()

    def finished(self) -> list[CopyResult]:
        for result in super().finished():
            landing, window, slots = self._windows[result.job.number]
            then = partial(self._landed, result)
            if result.ok and slots and window.proof is None:
                self._inlet.staging.copy_in(slots, window.dst_pages, then)
            else:
                then(result.error)  # (a proof has proven all by being in its slot)
        self._inlet.staging.poll()
        self._begin()
        over, self._over = self._over, []
        return over

    def close(self, deadline: float) -> bool:
        """The staging's thread, too: it copies into the pool."""
        return all([super().close(deadline), self._inlet.staging.stop(deadline)])

    def _begin(self) -> None:
        while self._queue:
            landing = self._queue[0]
            count = min(landing.left, self._inlet.window)
            slots = self._inlet.slots.take(count)
            if slots is None:
                return
            self._queue.popleft()
            self._start(landing, count, slots)
            if landing.left and landing.running < AT_ONCE:
                self._queue.append(landing)

    def _start(self, landing: _StagedJob, count: int, slots: list[int]) -> None:
        """Begin the next window: into `slots`, or without any straight into the pool."""
        window, number = landing.next(count), next(self._numbers)
        landing.running += 1
        self._windows[number] = landing, window, slots
        dst_pages = tuple(slots) or window.dst_pages
        super().submit(landing.route, replace(window, number=number, dst_pages=dst_pages))

    def _landed(self, result: CopyResult, error: EyasError | None) -> None:
        landing, _, slots = self._windows.pop(result.job.number)
        self._inlet.slots.give(slots)
        landing.running -= 1
        landing.bytes += result.bytes
        landing.seconds += result.seconds
        landing.path = result.path
        landing.error = landing.error or error
        if landing.left and landing not in self._queue:
            self._queue.append(landing)
        self._settle(landing)

    def _settle(self, landing: _StagedJob) -> None:
        """Removes a job without waiting pages from the queue; when its last window has landed it is over."""
        if landing.left:
            return
        if landing in self._queue:
            self._queue.remove(landing)
        if not landing.running:
            self._landings.remove(landing)
            ended = (landing.path, landing.bytes, landing.seconds, landing.error)
            self._over.append(CopyResult(landing.job, *ended))
