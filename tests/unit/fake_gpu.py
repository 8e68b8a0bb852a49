"""A GPU's driver made of files in memory: real descriptors, real mappings, and the same rule of lifetime.

Memory lives as long as a process has it mapped or has a descriptor of it, as a GPU's does.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eyas.common.types import RankPages
from eyas.common.wire.pool import Export, PoolGeometry
from kv_transfer.area import DeviceArea, PoolArea
from kv_transfer.backends.base import BackendSite, CopyJob, CopyResult
from kv_transfer.backends.cuda_ipc import CudaIpcBackend, PeerRank
from kv_transfer.gpu import handover
from kv_transfer.gpu.driver import CopyBlock, DeviceAllocation, DriverError, GpuMemory
from kv_transfer.gpu.handover import DescriptorGiver


class FakeDriver:
    """A `kv_transfer.gpu.driver.GpuDriver`. `sees`: the GPUs whose memory it can read."""

    def __init__(self, uuid: bytes = b"gpu-a", sees: tuple[bytes, ...] = (b"gpu-a", b"gpu-b")) -> None:
        self.uuid = uuid
        self._sees = sees
        self._mapped: dict[int, mmap.mmap] = {}
        self._descriptors: dict[int, int] = {}
        self.registered: dict[int, int] = {}  # bytes of the host's memory by address
        self.ordinal, self.pci_address, self.capable = 0, "0000:1b:00.0", True

    def rdma_capable(self, address: int) -> bool:
        return self.capable

    def bound(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @property
    def mappings(self) -> int:
        """How many memories are mapped now, own ones included."""
        return len(self._mapped)

    def obstacle(self, uuid: bytes) -> str:
        return "" if uuid in self._sees else "this process does not see the peer's GPU"

    def allocate(self, size: int) -> GpuMemory:
        descriptor = os.memfd_create("fake-gpu")
        os.ftruncate(descriptor, size)
        memory = self.map(descriptor, size)
        self._descriptors[memory.address] = descriptor
        return GpuMemory(memory.address, size, handle=1)

    def adopt(self, path: str) -> GpuMemory:
        """A file's bytes, as if they were this GPU's."""
        descriptor = os.open(path, os.O_RDWR)
        memory = self.map(descriptor, os.fstat(descriptor).st_size)
        self._descriptors[memory.address] = descriptor
        return GpuMemory(memory.address, memory.size, handle=1)

    def export(self, memory: GpuMemory) -> int:
        return os.dup(self._descriptors[memory.address])

    def map(self, descriptor: int, size: int) -> GpuMemory:
        if os.fstat(descriptor).st_size < size:
            raise DriverError("the descriptor is of less memory")
        mapped = mmap.mmap(descriptor, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._mapped[address] = mapped
        return GpuMemory(address, size)

    def unmap(self, memory: GpuMemory) -> None:
        self._mapped.pop(memory.address).close()
        if memory.handle:
            os.close(self._descriptors.pop(memory.address))

    def empty(self, memory: GpuMemory) -> GpuMemory:
        os.ftruncate(self._descriptors[memory.address], 0)  # who touches it now gets a SIGBUS
        return GpuMemory(memory.address, memory.size)

    def refill(self, memory: GpuMemory) -> GpuMemory:
        os.ftruncate(self._descriptors[memory.address], memory.size)
        return GpuMemory(memory.address, memory.size, handle=1)

    def register(self, address: int, size: int) -> int:
        assert address % mmap.PAGESIZE == 0 and size % mmap.PAGESIZE == 0
        self.registered[address] = size
        return address

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def copy(self, blocks: Sequence[CopyBlock]) -> None:
        for block in blocks:
            for row in range(block.rows):
                source, target = (
                    block.source + row * block.source_pitch,
                    block.target + row * block.target_pitch,
                )
                ctypes.memmove(target, source, block.width)

    def copy_host(self, blocks: Sequence[CopyBlock], *, out: bool) -> None:
        self.copy(blocks)

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)


END_S = 5.0

GEOMETRY = PoolGeometry(pages=40, page_size=4, layers=4, kv_heads=8, head_dim=4, dtype="float32")
"""Pages of 4,096 bytes."""


class FakePool:
    """A pool on fake GPUs, of as many ranks as there are `drivers`, and its backend."""

    def __init__(self, folder: str, *drivers: FakeDriver, geometry: PoolGeometry = GEOMETRY) -> None:
        self.drivers = drivers or (FakeDriver(),)
        self.geometry = geometry
        self.givers: list[DescriptorGiver] = []
        self.areas = tuple(self._area(folder, driver) for driver in self.drivers)
        nowhere = PoolArea(np.empty((1, 0), np.uint8))
        self.backend = CudaIpcBackend(BackendSite(nowhere, folder, wire=None, devices=self.areas))  # type: ignore[arg-type]

    def _area(self, folder: str, driver: FakeDriver) -> DeviceArea:
        pool = DeviceAllocation.new(driver, self.geometry.pool_bytes + self.geometry.page_bytes)
        path = Path(folder) / f"eyas-{os.getpid()}-{secrets.token_hex(4)}-giver"
        self.givers.append(DescriptorGiver(path, pool.memory.size, pool.export))
        return DeviceArea(pool.memory.address, self.geometry, pool, str(path))

    def close(self) -> None:
        """Ends the pool's threads; its memory is let go with it."""
        for giver in self.givers:
            giver.close()
        assert self.backend.close(time.monotonic() + END_S)

    @property
    def giver(self) -> DescriptorGiver:
        """That of the last rank."""
        return self.givers[-1]

    @property
    def driver(self) -> FakeDriver:
        """That of the first rank."""
        return self.drivers[0]

    def pages(self, rank: int = 0) -> NDArray[np.uint8]:
        """A copy of the bytes of all pages, uint8 [pages + 1, page bytes]."""
        size = self.geometry.pool_bytes + self.geometry.page_bytes
        data = self.drivers[rank].read(self.areas[rank].address, size)
        return np.frombuffer(data, np.uint8).reshape(-1, self.geometry.page_bytes)

    def fill(self, pages: NDArray[np.uint8], rank: int = 0) -> None:
        """The pages get the bytes of `pages`, uint8 [pages + 1, page bytes]."""
        ctypes.memmove(self.areas[rank].address, pages.tobytes(), pages.nbytes)


def adopted(site: BackendSite, giver: str = "") -> DeviceArea:
    """A site's area as the pool of a fake GPU, which has its file's bytes."""
    pages, page_bytes = site.area.pages.shape
    small = PoolGeometry(
        pages=pages - 1, page_size=1, layers=1, kv_heads=1, head_dim=page_bytes // 8, dtype="float32"
    )
    driver = FakeDriver()
    pool = DeviceAllocation(driver, driver.adopt(site.area.path))
    return DeviceArea(pool.memory.address, small, pool, giver)


class OnFakeGpu(CudaIpcBackend):
    """The backend of a site's area, whose file is the memory of a fake GPU."""

    def __init__(self, site: BackendSite) -> None:
        path = Path(site.pool_dir) / f"eyas-{os.getpid()}-{secrets.token_hex(4)}-giver"
        area = adopted(site, str(path))
        assert area.allocation is not None
        self._giver = DescriptorGiver(path, area.allocation.memory.size, area.allocation.export)
        super().__init__(BackendSite(site.area, site.pool_dir, site.wire, (area,)))

    def close(self, deadline: float) -> bool:
        self._giver.close()
        return super().close(deadline)


COUNT, PAGE = GEOMETRY.pages, GEOMETRY.page_bytes


def copied(pool: FakePool, source: PeerRank, job: CopyJob) -> CopyResult:
    pool.backend.start(source, job)
    end = time.monotonic() + END_S + handover.TAKE_S
    while time.monotonic() < end:
        if results := pool.backend.poll():
            (result,) = results
            return result
        time.sleep(0.002)
    raise AssertionError("the copy did not stop")


def opened(pool: FakePool, export: Export) -> PeerRank:
    source = pool.backend.open(export)
    assert isinstance(source, PeerRank)
    return source


def job(*pairs: tuple[int, int]) -> CopyJob:
    src, dst = zip(*pairs, strict=True)
    return CopyJob(1, 0, RankPages(0, src), dst)
