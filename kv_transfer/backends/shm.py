"""`shm`: the source pool is another process's file in shared memory, mapped here read-only.

A pool's file is created at its full size, never resized, and unlinked when its worker ends: so a mapping
stays readable whatever becomes of the peer, and only the lease decides what its bytes are worth.
"""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eyas.common.errors import TransferFailed
from kv_transfer.backends.base import Backend, Copy, Pages, copy_pages


@dataclass(frozen=True)
class Mapping:
    """A pool's file in this process's memory, for as long as `pages` is kept."""

    path: str
    inode: int  # not reused while it is mapped, so it names one incarnation of the pool
    pages: Pages

    def is_current(self) -> bool:
        try:
            return os.stat(self.path).st_ino == self.inode
        except FileNotFoundError:
            return False


class ShmBackend(Backend):
    """Copies from pool files directly in `pool_dir`: a peer may name no other file of this machine."""

    name = "shm"

    def __init__(self, destination: Pages, pool_dir: str) -> None:
        self._destination = destination
        self._pool_dir = Path(pool_dir)
        self._mappings: dict[str, Mapping] = {}

    def copy(self, job: Copy) -> int:
        return copy_pages(job, self._source(job.source.pool), self._destination)

    def close(self) -> None:
        self._mappings.clear()

    def _source(self, pool: str) -> Pages:
        """The peer's pool, mapped once for each incarnation of its file."""
        known = self._mappings.get(pool)
        if known is None or not known.is_current():
            # Whenever a new pool appears, the memory of those that are gone goes back to the machine.
            self._mappings = {m.path: m for m in self._mappings.values() if m.is_current()}
            known = self._mappings[pool] = self._map(pool)
        return known.pages

    def _map(self, pool: str) -> Mapping:
        if Path(pool).parent != self._pool_dir:
            raise TransferFailed(f"The pool {pool} is not in {self._pool_dir}.")
        return map_pool(pool, self._destination.shape[1])


def map_pool(path: str, page_bytes: int, *, writable: bool = False) -> Mapping:
    """Map a pool's file as [pages, page_bytes]; its size says how many pages it has.

    Raises TransferFailed if there is no such file, or it is no pool of such pages.
    """
    flags, access = (os.O_RDWR, mmap.ACCESS_WRITE) if writable else (os.O_RDONLY, mmap.ACCESS_READ)
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise TransferFailed(f"The pool {path} cannot be opened: {error.strerror}.") from error
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size == 0 or info.st_size % page_bytes:
            raise TransferFailed(f"The file {path} is not a pool of pages of {page_bytes} bytes.")
        memory = mmap.mmap(fd, info.st_size, access=access)
    finally:
        os.close(fd)
    return Mapping(path, info.st_ino, np.frombuffer(memory, np.uint8).reshape(-1, page_bytes))
