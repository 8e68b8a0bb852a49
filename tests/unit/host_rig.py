"""Host memory whose copies stop when the test says so, and what pages and slots hold, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from eyas.common.errors import EyasError
from kv_transfer.copy_threads import Then


@dataclass(eq=False)
class Job:
    """A copy that runs. What it `read` first is all that it reads of places that do not change meanwhile."""

    sources: list[int]
    targets: list[int]
    out: bool
    then: Then
    read: list[object]


@dataclass
class HandMemory:
    """`pages` and `places`: what is in the device's pages and in the slots."""

    ready: int
    pages: dict[int, object] = field(default_factory=dict)
    places: dict[int, object] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    page_bytes: int = 100
    bytes_out: int = 0
    bytes_in: int = 0
    copy_s: float = 0.0
    _stopped: list[tuple[Job, EyasError | None]] = field(default_factory=list)

    @property
    def copying(self) -> bool:
        return bool(self.jobs or self._stopped)

    def copy_out(self, pages: Sequence[int], slots: Sequence[int], then: Then) -> None:
        self.jobs.append(Job([*pages], [*slots], True, then, [self.pages.get(page) for page in pages]))

    def copy_in(self, slots: Sequence[int], pages: Sequence[int], then: Then) -> None:
        self.jobs.append(Job([*slots], [*pages], False, then, [self.places.get(slot) for slot in slots]))

    def finish(self, job: Job, error: EyasError | None = None) -> None:
        """The copy stops now. Of a source that changed while it ran, nothing of use was read."""
        self.jobs.remove(job)
        source, target = (self.pages, self.places) if job.out else (self.places, self.pages)
        for first, place, to in zip(job.read, job.sources, job.targets, strict=True):
            target[to] = first if first == source.get(place) and error is None else "torn"
        self.bytes_out += self.page_bytes * len(job.sources) * job.out
        self.bytes_in += self.page_bytes * len(job.sources) * (not job.out)
        self._stopped.append((job, error))

    def finish_all(self) -> None:
        for job in list(self.jobs):
            self.finish(job)

    def poll(self) -> None:
        stopped, self._stopped = self._stopped, []
        for job, error in stopped:
            job.then(error)

    def close(self, deadline: float) -> bool:
        return True
