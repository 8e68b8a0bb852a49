"""The interface of a backend, the records of one copy, and what is common to ways whose copies block."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from eyas.common.errors import EyasError, TransferFailed
from eyas.common.types import RankPages
from eyas.common.wire.pool import Export
from kv_transfer.area import DeviceArea, DeviceSlots, Pages, PoolArea
from kv_transfer.copy_threads import CopyDone, CopyThreads, Ring, silent
from kv_transfer.layout import WHOLE, PagePart
from kv_transfer.nics import RdmaCard


@dataclass(frozen=True)
class CopyJob:
    """One job: page `source.pages[i]` of the peer's pool becomes page `dst_pages[i]` of ours.

    (Of the staging beside ours where that is a device's, unless the backend is direct.) `pull` and `number`
    name the job. `proof`: the CRC-32 that the only page must have when it has come. `part`: what comes of
    each page, to the beginning of its place in the staging; a slot may take several, so `parts` says how many
    come (0: as many as there are pages).
    """

    pull: int
    number: int
    source: RankPages
    dst_pages: tuple[int, ...]
    proof: int | None = None
    part: PagePart = WHOLE
    parts: int = 0

    @property
    def count(self) -> int:
        """Pages, or parts of them, that come."""
        return self.parts or len(self.dst_pages)

    @property
    def name(self) -> tuple[int, int]:
        """The pull and the number of the job in it."""
        return self.pull, self.number


@dataclass(frozen=True)
class CopyResult:
    """A job that has stopped: nothing touches its destination pages any more, whatever `error` says."""

    job: CopyJob
    path: str  # the backend that really moved the bytes
    bytes: int
    seconds: float
    error: EyasError | None = None

    @property
    def ok(self) -> bool:
        """Whether every page was copied."""
        return self.error is None


class PeerSource:
    """A peer's pool, opened by one backend, which subclasses this with what its copies need.

    `is_staging`: not the pool but staging slots, which are empty until their owner copies pages to them.
    `on_device`: those slots are in its devices' memory, and ours for them too.
    `direct`: what is read of it lands in our device's pool itself, not in the site's area.
    """

    is_staging: bool = False
    on_device: bool = False
    direct: bool = False

    @property
    def current(self) -> bool:
        """False once the peer's process is known to have ended: its mappings may be released."""
        return True

    @property
    def divides(self) -> bool:
        """Whether some heads of its pages can come alone, to staging here."""
        return self.is_staging


class TransferWire(Protocol):
    """The worker's front, for backends whose bytes it carries."""

    def fetch(self, job: CopyJob) -> None:
        """Requests the bytes of a job; `stopped` returns its one result."""
        ...

    def stop(self, job: CopyJob) -> None:
        """Cancels a fetch or a staging call, if it still runs."""
        ...

    def stopped(self) -> list[CopyDone[CopyJob]]:
        """The jobs that stopped since the last call."""
        ...

    def stage(self, job: CopyJob) -> None:
        """Requests copies of a job's pages in the owner's staging, at most one window.

        `staged` returns the slots, unless the call fails, and `let_go` its one result.
        """
        ...

    def read(self, job: CopyJob) -> None:
        """Reports that the slots have been read."""
        ...

    def staged(self, mine: Container[tuple[int, int]]) -> list[tuple[CopyJob, tuple[int, ...]]]:
        """Returns the jobs, of those with these names, whose pages were staged since the last call, and
        their slots.
        """
        ...

    def let_go(self, mine: Container[tuple[int, int]]) -> list[CopyDone[CopyJob]]:
        """Returns the jobs, of those with these names, whose slots the owner has freed. Without an error they
        stayed intact until they were read.
        """
        ...


@dataclass(frozen=True)
class BackendSite:
    """The surroundings of a backend. `pool_dir`: the folder where areas of this host lie.

    `devices`: the pool, where it is in the memory of devices, one per rank; `area` is then the staging beside
    it, whose slots hold pages of any peer at any moment, and without a path if there is none. `slots`: those
    in the devices' memory, one record per rank, if there are some. `host`: how other hosts name this one.
    `cards`: the RDMA cards that may be used; None: those near each device. `ring`: called by a thread of a
    backend when a copy has stopped.
    """

    area: PoolArea
    pool_dir: str
    wire: TransferWire
    devices: tuple[DeviceArea, ...] = ()
    slots: tuple[DeviceSlots, ...] = ()
    host: str = "127.0.0.1"
    cards: tuple[RdmaCard, ...] | None = None
    ring: Ring = silent


class TransferBackend(ABC):
    """One way for whole pages, of one pool. Called by the engine's loop only; no call blocks, but `close`.

    `name` is the route's: exports, `--transfer`, timings and metrics show it. `direct`: it goes from GPU to
    GPU, without host memory between them.
    """

    name: ClassVar[str]
    direct: ClassVar[bool] = False

    def drawback(self, export: Export) -> str:
        """Why `auto` passes over this way to the pages of a peer that exports that; empty: it does not."""
        return ""

    @abstractmethod
    def export(self, rank: int = 0) -> Export | None:
        """Returns the fields with which a peer opens one rank's pool; None if this way leads nowhere."""

    @abstractmethod
    def open(self, export: Export) -> PeerSource:
        """A peer's pool, by what its `export` said. Nothing is copied, so nothing is proven.

        Raises ConfigError, saying why, where this way does not lead to it.
        """

    @abstractmethod
    def start(self, source: PeerSource, job: CopyJob) -> None:
        """Starts a copy. One `CopyResult` follows when it has stopped.

        It follows within a bounded time, unless it cannot be stopped and the peer neither answers nor dies.
        """

    @abstractmethod
    def poll(self) -> list[CopyResult]:
        """The copies that stopped since the last call."""

    @property
    def crossed(self) -> Collection[tuple[int, int]]:
        """The names of copies whose bytes have arrived, but whose owner has yet to confirm them."""
        return ()

    @abstractmethod
    def cancel(self, job: CopyJob) -> None:
        """Cancels a copy. Only its result from `poll` shows that it has stopped."""

    @abstractmethod
    def checksum(self, proof: CopyJob) -> int:
        """CRC-32 of the page that `proof` has copied. Call it once, after `poll` has returned its success.

        Raises TransferFailed if it cannot be read.
        """

    @abstractmethod
    def close(self, deadline: float) -> bool:
        """Releases all memory; returns False if a copy still runs at `deadline` (monotonic seconds).

        After False the destination must stay mapped. Jobs that have not begun are reported as cancelled.
        """


def copy_pages(job: CopyJob, source: Pages, destination: Pages) -> int:
    """Copies a job's pages between mapped areas, one run of consecutive pages at a time; returns the bytes.

    NumPy releases the GIL while it copies, so the engine's loop continues.
    """
    check_pages(job, len(source))
    for src, dst, count in runs(job.source.pages, job.dst_pages):
        destination[dst : dst + count] = source[src : src + count]
    return len(job.dst_pages) * int(destination.shape[1])


def check_pages(job: CopyJob, count: int) -> None:
    """Raises TransferFailed unless the peer's pool of `count` pages has all pages of the job."""
    pages = job.source.pages
    if pages and not 0 <= min(pages) <= max(pages) < count:
        raise TransferFailed(f"the handle names pages that its owner's pool of {count} pages does not have")


def runs(
    src: tuple[int, ...], dst: tuple[int, ...], piece: int = sys.maxsize
) -> Iterator[tuple[int, int, int]]:
    """(first source page, first destination page, count) of every stretch where both go up by one.

    None goes on from one piece of `piece` source pages to the next.
    """
    start = 0
    for i in range(1, len(src) + 1):
        new = i == len(src) or src[i] != src[i - 1] + 1 or dst[i] != dst[i - 1] + 1
        if new or src[i] % piece == 0:
            yield src[start], dst[start], i - start
            start = i


class BlockingBackend(TransferBackend):
    """A subclass says what it exports, what it opens, and how it copies."""

    def __init__(self, site: BackendSite) -> None:
        self.area = site.area
        self._thread: CopyThreads[CopyJob] = CopyThreads(self.name, site.ring)
        self._checksums: dict[tuple[int, int], int] = {}  # of proofs, by name, until they are asked for

    @abstractmethod
    def copy(self, source: PeerSource, job: CopyJob) -> int:
        """Move the bytes of a job and give their number; called by the copy thread.

        Raises an EyasError (TransferFailed if the peer is gone). However it ends, nothing writes to the
        destination afterwards, and it ends within a bounded time.
        """

    def read_back(self, source: PeerSource, proof: CopyJob) -> int:
        """CRC-32 of the page that `proof` has brought, where it landed; called by the copy thread.

        A backend whose copies do not land in `area` has its own.
        """
        return self.area.checksum(proof.dst_pages[0])

    def start(self, source: PeerSource, job: CopyJob) -> None:
        self._thread.submit(job, lambda: self._do(source, job))

    def poll(self) -> list[CopyResult]:
        done = self._thread.finished()
        return [CopyResult(d.job, self.name, d.bytes, d.seconds, d.error) for d in done]

    def cancel(self, job: CopyJob) -> None:
        self._thread.cancel(job)

    def checksum(self, proof: CopyJob) -> int:
        return self._checksums.pop(proof.name)

    def close(self, deadline: float) -> bool:
        return self._thread.close(deadline)

    def _do(self, source: PeerSource, job: CopyJob) -> int:
        moved = self.copy(source, job)
        if job.proof is not None:
            self._checksums[job.name] = self.read_back(source, job)
        return moved
