"""READs of a peer's memory: backends whose puller reads an area, or the staging beside a device's pool.

Staging's slots are filled, read, and given back; a copy is a window then, at most.

    REQUESTED ──its slots──> READING ──all came──> CONFIRMING ──they are intact──> over
        └───────────────failed: over, once nothing of it runs───────────────────────^

A READ is one-sided: that its bytes came says nothing about what they were. So a window counts only when the
peer says afterwards that nothing else was written to its slots.
"""

from __future__ import annotations

import enum
from abc import abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from eyas.common.errors import Cancelled, EyasError, TransferFailed
from eyas.common.types import RankPages
from eyas.common.wire.pool import Export
from kv_transfer.backends.base import (
    BackendSite,
    CopyJob,
    CopyResult,
    PeerSource,
    TransferBackend,
    TransferWire,
)
from kv_transfer.copy_threads import CopyDone
from kv_transfer.layout import slots_for

_STAGED = "staged"  # of an export: it is of slots beside a device's pool


def is_staging(export: Export) -> bool:
    """Whether what a peer exports is staging, which holds nothing until its owner is asked."""
    return _STAGED in export


class ReadingBackend(TransferBackend):
    """A subclass reads memory (`_read`, `_stop`, `_stopped`); whether it is staging is decided here."""

    def __init__(self, site: BackendSite) -> None:
        self.area = site.area
        self.exports_staging = bool(site.devices)
        self._staged = StagedCopies(site.wire, self._read, self._stop)

    def _offered(self, fields: Export) -> Export:
        """An export with these fields, which also says whether it is of staging."""
        return {**fields, _STAGED: b"1"} if self.exports_staging else fields

    @abstractmethod
    def _read(self, source: PeerSource, job: CopyJob) -> None:
        """Begins to read a job, whose source pages are places in the peer's memory. One `CopyDone`
        follows."""

    @abstractmethod
    def _stop(self, job: CopyJob) -> None:
        """Ends it early; jobs that are over, or none of this, are no-ops."""

    @abstractmethod
    def _stopped(self) -> list[CopyDone[CopyJob]]:
        """The READs that have stopped since the last call."""

    def start(self, source: PeerSource, job: CopyJob) -> None:
        if source.is_staging:
            self._staged.start(source, job)
        else:
            self._read(source, job)

    def poll(self) -> list[CopyResult]:
        done = [one for one in self._stopped() if not self._staged.stopped(one)] + self._staged.poll()
        return [CopyResult(d.job, self.name, d.bytes, d.seconds, d.error) for d in done]

    @property
    def crossed(self) -> Collection[tuple[int, int]]:
        return self._staged.crossed

    def cancel(self, job: CopyJob) -> None:
        if not self._staged.cancel(job):
            self._stop(job)

    def checksum(self, proof: CopyJob) -> int:
        return self.area.checksum(proof.dst_pages[0])


class StagedPhase(enum.Enum):
    """The state of a job; the module's picture shows the ways between them."""

    REQUESTED = "requested"
    READING = "reading"
    CONFIRMING = "confirming"


@dataclass(eq=False)
class _StagedRead:
    """A job's READ. `owns_slots`: slots may still be ours. `read`: the job with its slots, while READING."""

    source: PeerSource
    job: CopyJob
    phase: StagedPhase = StagedPhase.REQUESTED
    owns_slots: bool = True
    read: CopyJob | None = None
    bytes: int = 0
    seconds: float = 0.0
    error: EyasError | None = None


class StagedCopies:
    """`read` begins a READ of a job whose pages are slots, `stop` asks for its end; `stopped` hears of it."""

    def __init__(
        self,
        wire: TransferWire,
        read: Callable[[PeerSource, CopyJob], None],
        stop: Callable[[CopyJob], None],
    ) -> None:
        self._wire = wire
        self._read = read
        self._stop = stop
        self._jobs: dict[tuple[int, int], _StagedRead] = {}
        self._over: list[CopyDone[CopyJob]] = []

    @property
    def crossed(self) -> list[tuple[int, int]]:
        """The names of jobs that wait for nothing but the owner's word."""
        return [name for name, job in self._jobs.items() if job.phase is StagedPhase.CONFIRMING]

    def start(self, source: PeerSource, job: CopyJob) -> None:
        """Begins a copy of a window, at most; `poll` gives its one result."""
        self._jobs[job.name] = _StagedRead(source, job)
        self._wire.stage(job)

    def cancel(self, job: CopyJob) -> bool:
        """Ends a job early; False for one that is over, or none of this."""
        if job.name not in self._jobs:
            return False
        self._fail(self._jobs[job.name], Cancelled("the copy was given up"))
        return True

    def stopped(self, done: CopyDone[CopyJob]) -> bool:
        """A READ has stopped: whether it was one of these."""
        job = self._jobs.get(done.job.name)
        if job is None:
            return False
        job.phase, job.read = StagedPhase.CONFIRMING, None
        job.bytes, job.seconds = done.bytes, done.seconds
        if done.error is not None:
            self._fail(job, done.error)
        elif job.error is None:
            self._wire.read(job.job)
        self._settle(job)
        return True

    def poll(self) -> list[CopyDone[CopyJob]]:
        """Handles the peer's messages; returns the jobs that have stopped since the last call."""
        if self._jobs:
            for window, slots in self._wire.staged(self._jobs):
                self._staged(self._jobs[window.name], window, slots)
            for done in self._wire.let_go(self._jobs):
                self._let_go(self._jobs[done.job.name], done)
        over, self._over = self._over, []
        return over

    def _staged(self, job: _StagedRead, window: CopyJob, slots: tuple[int, ...]) -> None:
        if job.error is not None:
            return
        if len(slots) != (due := slots_for(window.count, window.part.there)):
            self._fail(job, TransferFailed(f"the owner staged pages in {len(slots)} slots of {due}"))
            return
        job.phase = StagedPhase.READING
        job.read = replace(window, source=RankPages(window.source.rank, slots))
        self._read(job.source, job.read)

    def _let_go(self, job: _StagedRead, done: CopyDone[CopyJob]) -> None:
        job.owns_slots = False
        if done.error is not None:
            self._fail(job, done.error)
        elif job.phase is not StagedPhase.CONFIRMING:
            self._fail(job, TransferFailed("the owner let go of slots that were not read yet"))
        self._settle(job)

    def _fail(self, job: _StagedRead, error: EyasError) -> None:
        """Ends it as soon as nothing of it runs."""
        job.error = job.error or error
        if job.owns_slots:
            self._wire.stop(job.job)
        if job.read is not None:
            self._stop(job.read)

    def _settle(self, job: _StagedRead) -> None:
        if job.owns_slots or job.phase is StagedPhase.READING:
            return
        del self._jobs[job.job.name]
        moved = 0 if job.error else job.bytes
        self._over.append(CopyDone(job.job, moved, job.seconds, job.error))
