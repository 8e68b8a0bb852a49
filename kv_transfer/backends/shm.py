"""`shm`: the peer's area is another process's file in shared memory, mapped here read-only.

An area's file is created at its full size, never resized, and unlinked when its worker ends: so a mapping
stays readable whatever becomes of the peer, and only the lease decides what its bytes are worth.
"""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass

import numpy as np

from eyas.common.errors import ConfigError, TransferFailed
from eyas.common.wire.pool import Export
from kv_transfer.area import Pages
from kv_transfer.backends.base import BackendSite, BlockingBackend, CopyJob, PeerSource, copy_pages
from kv_transfer.host_files import HostFile


@dataclass(frozen=True)
class MappedArea(PeerSource):
    """An area's file in this process's memory, for as long as `pages` is kept."""

    path: str
    inode: int  # not reused while it is mapped, so it names one incarnation of the area
    pages: Pages

    @property
    def current(self) -> bool:
        try:
            return os.stat(self.path).st_ino == self.inode
        except FileNotFoundError:
            return False


class ShmBackend(BlockingBackend):
    """Copies from files directly in `pool_dir`: a peer may name no other file of this machine."""

    name = "shm"

    def __init__(self, site: BackendSite) -> None:
        super().__init__(site.area)
        self._pool_dir = site.pool_dir
        self._path = "" if site.devices else site.area.path  # no peer reads staging

    def export(self, rank: int = 0) -> Export | None:
        return HostFile.at(self._path).export() if self._path else None

    def open(self, export: Export) -> PeerSource:
        """Opens the file only if it is the very one that the peer has (containers share names, not files)."""
        path = HostFile.find(export, self._pool_dir).path
        try:
            return map_file(path, self.area.pages.shape[1])
        except TransferFailed as error:
            raise ConfigError(error.message) from error

    def copy(self, source: PeerSource, job: CopyJob) -> int:
        assert isinstance(source, MappedArea)
        if not source.current:
            raise TransferFailed(f"the pool {source.path} is gone")
        return copy_pages(job, source.pages, self.area.pages)


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
