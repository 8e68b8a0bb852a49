"""The memory that backends read from and write to: whole pages, in this host's memory or in a device's.

Behind the last page of every pool lies its proof page. What pages hold, and who may read them, is not this
file's business; nor is how a device's memory is allocated.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from eyas.common.errors import ConfigError, TransferFailed
from eyas.common.wire.pool import PoolGeometry
from kv_transfer.gpu.driver import DeviceAllocation, DriverError

Pages: TypeAlias = NDArray[np.uint8]  # [pages, page_bytes], a view of a page-major pool


@dataclass(frozen=True)
class PoolArea:
    """Pages in host memory: a whole pool, its proof page last; or the staging slots beside a device's pool.

    `path`: the file that they are in; empty: in none.
    """

    pages: Pages
    path: str = ""

    @classmethod
    def new(cls, memory: memoryview, page_bytes: int, path: str = "") -> PoolArea:
        """Over memory of whole pages, whose last becomes the proof page: no other pool has its bytes."""
        if memory.nbytes < 2 * page_bytes or memory.nbytes % page_bytes:
            raise ConfigError(f"memory of {memory.nbytes} bytes holds no pages of {page_bytes} and a proof")
        area = cls(np.frombuffer(memory, np.uint8).reshape(-1, page_bytes), path)
        area.pages[-1] = np.frombuffer(os.urandom(page_bytes), np.uint8)
        return area

    def checksum(self, page: int) -> int:
        """CRC-32 of one page."""
        return zlib.crc32(self.pages[page].data)


@dataclass(frozen=True)
class DeviceArea:
    """One rank's pool in a device's memory, from `address` on: its pages, and behind them the proof page.

    `allocation`: what other processes can map of it, by the socket `giver`; None: it is memory that they
    cannot map.
    """

    address: int
    geometry: PoolGeometry
    allocation: DeviceAllocation | None = None
    giver: str = ""

    def checksum(self, page: int) -> int:
        """CRC-32 of one page, which is read from the device. Raises TransferFailed if that fails."""
        assert self.allocation is not None
        size = self.geometry.page_bytes
        try:
            return zlib.crc32(self.allocation.driver.read(self.address + page * size, size))
        except DriverError as error:
            raise TransferFailed(f"a page of the GPU cannot be read: {error}") from None


@dataclass(frozen=True)
class DeviceSlots:
    """Staging slots in one rank's device, from `address` on, and behind the last a page of no use.

    `device`: its number. `memory`: what owns them, for as long as they are used.
    """

    address: int
    page_bytes: int
    slots: int
    device: int
    memory: object


def map_file(path: Path) -> mmap.mmap:
    """A file that another process of this host has made, mapped, to be read and written."""
    fd = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)


def allocate_file(path: Path) -> None:
    """Allocates what a file of ours gave back. Raises ConfigError if its folder cannot hold it."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.posix_fallocate(fd, 0, os.fstat(fd).st_size)
    except OSError as error:
        raise ConfigError(f"{path.parent} cannot hold KV pages: {error.strerror}") from None
    finally:
        os.close(fd)


def create_file(path: Path, size: int) -> mmap.mmap:
    """A new file of `size` bytes, mapped. Raises ConfigError if its folder cannot hold it.

    It is allocated, not only sized: a full file system fails here, not by a SIGBUS in a kernel.
    """
    with contextlib.ExitStack() as undo:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ConfigError(f"{path.parent} cannot hold KV pages: {error.strerror}") from None
        undo.callback(path.unlink)
        try:
            os.posix_fallocate(fd, 0, size)
            mapped = mmap.mmap(fd, size)
        except OSError as error:
            text = f"{path.parent} cannot hold {size / 2**30:.2f} GiB of KV pages: {error}"
            raise ConfigError(text) from None
        finally:
            os.close(fd)
        undo.pop_all()
    return mapped
