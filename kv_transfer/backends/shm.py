"""`shm`: the peer's area is another process's file in shared memory, mapped here.

An area's file is created at its full size, never resized, and unlinked when its worker ends: so a mapping
stays readable whatever becomes of the peer, and only the lease decides what its bytes are worth.

Beside a device's pool that file is staging. Where ours is a GPU's as well, the slots are page-locked here
too, and the GPU's copy engines take pages out of them straight into its pool: no processor copies a byte.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from eyas.common.errors import ConfigError, TransferFailed
from eyas.common.wire.pool import Export
from kv_transfer.area import DeviceArea, Pages
from kv_transfer.backends.base import BackendSite, CopyJob, PeerSource, check_pages, copy_pages, runs
from kv_transfer.backends.staged_reads import ReadingBackend, is_staging
from kv_transfer.copy_threads import CopyDone, CopyThreads
from kv_transfer.gpu.driver import CopyBlock, DriverError, GpuDriver
from kv_transfer.host_files import HostFile
from kv_transfer.layout import window_pages


@dataclass(frozen=True)
class MappedArea(PeerSource):
    """An area's file in this process's memory, for as long as `pages` is kept."""

    path: str
    inode: int  # not reused while it is mapped, so it names one incarnation of the area
    pages: Pages
    is_staging: bool = False
    direct: bool = False

    @property
    def divides(self) -> bool:
        return False

    @property
    def current(self) -> bool:
        try:
            return os.stat(self.path).st_ino == self.inode
        except FileNotFoundError:
            return False


class ShmBackend(ReadingBackend):
    """Copies from files directly in `pool_dir`: a peer may name no other file of this machine."""

    name = "shm"

    def __init__(self, site: BackendSite) -> None:
        super().__init__(site)
        self._pool_dir = site.pool_dir
        self._pool = _LockedReads(site.devices[0]) if _reachable(site) else None
        # A GPU's copies are two at a time: one begins while the other ends.
        count = 1 if self._pool is None else 2
        self._threads: CopyThreads[CopyJob] = CopyThreads(self.name, site.ring, count)

    def export(self, rank: int = 0) -> Export | None:
        if not self.area.path:
            return None
        return self._offered(HostFile.at(self.area.path).export())

    def open(self, export: Export) -> PeerSource:
        """Opens the file only if it is the very one that the peer has (containers share names, not files)."""
        path, staged = HostFile.find(export, self._pool_dir).path, is_staging(export)
        direct = staged and self._pool is not None
        try:
            area = map_file(
                path, self.area.pages.shape[1], writable=direct
            )  # (as the driver's lock needs it)
        except TransferFailed as error:
            raise ConfigError(error.message) from error
        return MappedArea(area.path, area.inode, area.pages, staged, direct)

    def checksum(self, proof: CopyJob) -> int:
        landing = self.area if self._pool is None else self._pool.area
        return landing.checksum(proof.dst_pages[0])

    def close(self, deadline: float) -> bool:
        ended = self._threads.close(deadline)
        if ended and self._pool is not None:
            self._pool.close()
        return ended

    def copy(self, source: PeerSource, job: CopyJob) -> int:
        """Copies a job whose pages are places in the peer's area, and gives the bytes; on the thread."""
        assert isinstance(source, MappedArea)
        if not source.current:
            raise TransferFailed(f"the pool {source.path} is gone")
        if source.direct:
            assert self._pool is not None
            return self._pool.copy(source, job)
        return copy_pages(job, source.pages, self.area.pages)

    def _read(self, source: PeerSource, job: CopyJob) -> None:
        self._threads.submit(job, lambda: self.copy(source, job))

    def _stop(self, job: CopyJob) -> None:
        self._threads.cancel(job)

    def _stopped(self) -> list[CopyDone[CopyJob]]:
        return self._threads.finished()


def _reachable(site: BackendSite) -> bool:
    """Whether there is one device whose driver can copy into the pool. (Ranks have slots of ours between.)"""
    return len(site.devices) == 1 and site.devices[0].allocation is not None


@dataclass(eq=False)
class _LockedFile:
    """A peer's staging. `pieces`: those that are page-locked; `copies`: how many read it now."""

    area: MappedArea
    pieces: set[int] = field(default_factory=set)
    copies: int = 0


class _LockedReads:
    """Copies from peers' staging into the pool `area` by its GPU; two threads make them.

    What a copy reads is page-locked from then on, until its owner is gone and another's is locked. It is a
    window at a time: the driver launches no kernels meanwhile, and what is never read needs no lock.
    """

    def __init__(self, area: DeviceArea) -> None:
        assert area.allocation is not None
        self.area = area
        self._driver: GpuDriver = area.allocation.driver
        self._piece = piece_pages(area.geometry.page_bytes)
        self._files: dict[int, _LockedFile] = {}  # by inode
        self._changing = threading.Lock()  # `_files`

    def copy(self, source: MappedArea, job: CopyJob) -> int:
        """Gives the bytes. Raises TransferFailed if the driver cannot lock or copy."""
        size = self.area.geometry.page_bytes
        check_pages(job, len(source.pages))
        try:
            with self._locked(source, job.source.pages) as base:
                blocks = runs(job.source.pages, job.dst_pages, self._piece)
                self._driver.copy_host(
                    [
                        CopyBlock(base + src * size, self.area.address + dst * size, count * size)
                        for src, dst, count in blocks
                    ],
                    out=False,
                )
        except DriverError as error:
            raise TransferFailed(f"the peer's staging cannot be read by the GPU: {error}") from None
        return len(job.dst_pages) * size

    def close(self) -> None:
        """Unlocks all."""
        for file in self._files.values():
            self._unlock(file)
        self._files.clear()

    @contextlib.contextmanager
    def _locked(self, source: MappedArea, pages: Sequence[int]) -> Iterator[int]:
        """The address of a file of which these pages stay locked meanwhile: its mapping by the first copy."""
        with self._changing:
            if source.inode not in self._files:
                self._forget()
            file = self._files.setdefault(source.inode, _LockedFile(source))
            for piece in {page // self._piece for page in pages} - file.pieces:
                self._driver.register(*self._place(file.area, piece))
                file.pieces.add(piece)
            file.copies += 1
        try:
            yield file.area.pages.ctypes.data
        finally:
            with self._changing:
                file.copies -= 1

    def _forget(self) -> None:
        """Unlocks files of owners that are gone."""
        for inode, file in list(self._files.items()):
            if not file.area.current and not file.copies:
                self._unlock(file)
                del self._files[inode]

    def _unlock(self, file: _LockedFile) -> None:
        for piece in file.pieces:
            self._driver.unregister(self._place(file.area, piece)[0])

    def _place(self, area: MappedArea, piece: int) -> tuple[int, int]:
        """Address and bytes of a piece."""
        pages = area.pages[piece * self._piece : (piece + 1) * self._piece]
        return pages.ctypes.data, pages.nbytes


def piece_pages(page_bytes: int) -> int:
    """How many pages are locked together: a window of them, up to the end of a page of the machine."""
    whole = mmap.PAGESIZE // math.gcd(page_bytes, mmap.PAGESIZE)
    return -(-window_pages(page_bytes) // whole) * whole


def map_file(path: str, page_bytes: int, *, writable: bool = False) -> MappedArea:
    """Map an area's file as [pages, page_bytes]; its size says how many pages it has.

    Raises TransferFailed if there is no such file, or it holds no such pages.
    """
    flags, access = (os.O_RDWR, mmap.ACCESS_WRITE) if writable else (os.O_RDONLY, mmap.ACCESS_READ)
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise TransferFailed(f"the pool {path} cannot be opened: {error.strerror}") from error
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size == 0 or info.st_size % page_bytes:
            raise TransferFailed(f"the file {path} is not a pool of pages of {page_bytes} bytes")
        memory = mmap.mmap(fd, info.st_size, access=access)
    finally:
        os.close(fd)
    return MappedArea(path, info.st_ino, np.frombuffer(memory, np.uint8).reshape(-1, page_bytes))
