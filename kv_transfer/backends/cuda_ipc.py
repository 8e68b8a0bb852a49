"""`cuda_ipc`: the peer's pool is memory of a GPU of this host, which this process maps and reads.

The owner hands its memory over as a file descriptor. So a mapping stays readable when the owner dies, and
only the lease decides what its bytes are worth; but the GPU's memory is free only when all have unmapped it.
A thread per mapping therefore waits for the owner's end, and unmaps at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import zlib
from pathlib import Path

from eyas.common.errors import ConfigError, TransferFailed
from eyas.common.pool import Export
from kv_transfer.area import DeviceArea
from kv_transfer.backends.base import Copy, Site, Source, check_pages, runs
from kv_transfer.backends.blocking import BlockingBackend
from kv_transfer.backends.shm import file_identity
from kv_transfer.gpu.driver import Allocation, Block, Driver, DriverError, Memory
from kv_transfer.gpu.handover import Giver, take, wait_for_end


class PeerPool(Source):
    """A peer's pool, mapped when it is first read, until its owner ends or `close`."""

    def __init__(self, path: str, driver: Driver, page_bytes: int) -> None:
        self._path = path
        self._driver = driver
        self._page_bytes = page_bytes
        self._using = threading.Lock()  # by the copy that runs, or whoever maps or unmaps
        self._memory: Memory | None = None
        self._giver: socket.socket | None = None
        self._watcher: threading.Thread | None = None
        self._gone = False

    @property
    def current(self) -> bool:
        """False once the owner's process has ended."""
        return not self._gone

    def read(self, job: Copy, area: DeviceArea) -> int:
        """Copies the pages of `job` into `area`; the bytes. Raises TransferFailed if the owner is gone."""
        with self._using:
            memory = self._map()
            check_pages(job, memory.size // self._page_bytes)
            size = self._page_bytes
            self._driver.copy(
                [
                    Block(memory.address + src * size, area.address + dst * size, count * size)
                    for src, dst, count in runs(job.source.pages, job.dst_pages)
                ]
            )
        return len(job.dst_pages) * size

    def close(self) -> None:
        """Unmaps. No copy may be asked for afterwards."""
        with self._using:
            self._gone = True
            if self._giver is not None:
                with contextlib.suppress(OSError):
                    self._giver.shutdown(socket.SHUT_RDWR)
        if self._watcher is not None:
            self._watcher.join()

    def _map(self) -> Memory:
        if self._gone:
            raise TransferFailed(f"the owner of {self._path} is gone")
        if self._memory is None:
            taken = take(self._path)
            try:
                self._memory = self._driver.map(taken.descriptor, taken.size)
            except DriverError:
                taken.giver.close()
                raise
            finally:
                os.close(taken.descriptor)
            self._giver = taken.giver
            self._watcher = threading.Thread(target=self._until_end, name="kv-mapping", daemon=True)
            self._watcher.start()
        return self._memory

    def _until_end(self) -> None:
        assert self._giver is not None
        wait_for_end(self._giver)
        with self._using:  # a copy that runs ends well: the memory lives as long as it is mapped
            self._gone = True
            self._giver.close()
            assert self._memory is not None
            self._driver.unmap(self._memory)
            self._memory = None


class CudaIpcBackend(BlockingBackend):
    """Copies from pools whose sockets lie directly in `pool_dir`: a peer may name no other file here."""

    name = "cuda_ipc"
    direct = True

    def __init__(self, site: Site) -> None:
        super().__init__(site.area)
        self._pool_dir = Path(site.pool_dir)
        self._device = site.device
        self._giver: Giver | None = None
        self._opened: list[PeerPool] = []

    def export(self) -> Export | None:
        """Where the pool is handed over, and on which GPU it is."""
        if self._device is None or self._device.memory is None:
            return None
        pool = self._device.memory
        path = self._pool_dir / f"eyas-{os.getpid()}-{secrets.token_hex(4)}-giver"
        self._giver = Giver(path, pool.memory.size, pool.export)
        identity = file_identity(str(path)).encode()
        return {"path": str(path).encode(), "identity": identity, "gpu": pool.driver.uuid}

    def open(self, export: Export) -> Source:
        """Raises ConfigError if the peer is on another host, or on a GPU that ours cannot read."""
        area, pool = self._target()
        path, identity = (os.fsdecode(export.get(field, b"")) for field in ("path", "identity"))
        there = Path(path).parent == self._pool_dir and identity != ""
        if not there or file_identity(path) != identity:
            raise ConfigError(f"the peer's KV pool {path} is not one of {self._pool_dir} of this host")
        try:
            obstacle = pool.driver.obstacle(export.get("gpu", b""))
        except DriverError as error:
            obstacle = str(error)
        if obstacle:
            raise ConfigError(f"the peer's KV pool cannot be read: {obstacle}")
        self._opened = [source for source in self._opened if source.current]
        self._opened.append(PeerPool(path, pool.driver, area.page_bytes))
        return self._opened[-1]

    def copy(self, source: Source, job: Copy) -> int:
        assert isinstance(source, PeerPool)
        area, _ = self._target()
        try:
            return source.read(job, area)
        except DriverError as error:
            raise TransferFailed(str(error)) from None

    def checksum(self, page: int) -> int:
        """CRC-32 of one page of our own pool."""
        area, pool = self._target()
        return zlib.crc32(pool.driver.read(area.address + page * area.page_bytes, area.page_bytes))

    def close(self, deadline: float) -> bool:
        """Unmaps all peers' pools; False if a copy still runs."""
        if self._giver is not None:
            self._giver.close()
        if not super().close(deadline):
            return False
        for source in self._opened:
            source.close()
        return True

    def _target(self) -> tuple[DeviceArea, Allocation]:
        """Our own pool. Raises ConfigError if it is not on a GPU."""
        if self._device is None or self._device.memory is None:
            raise ConfigError("this worker's KV pool is not on a GPU")
        return self._device, self._device.memory
