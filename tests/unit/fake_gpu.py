"""A GPU's driver made of files in memory: real descriptors, real mappings, and the same rule of lifetime.

Memory lives as long as a process has it mapped or has a descriptor of it, as a GPU's does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_transfer.area import Area, DeviceArea
from kv_transfer.backends.base import Site
from kv_transfer.backends.cuda_ipc import CudaIpcBackend
from kv_transfer.gpu.driver import Allocation, Block, DriverError, Memory

PAGE = 4096


class FakeDriver:
    """A `kv_transfer.gpu.driver.Driver`. `sees`: the GPUs whose memory it can read."""

    def __init__(self, uuid: bytes = b"gpu-a", sees: tuple[bytes, ...] = (b"gpu-a", b"gpu-b")) -> None:
        self.uuid = uuid
        self._sees = sees
        self._mapped: dict[int, mmap.mmap] = {}
        self._descriptors: dict[int, int] = {}

    @property
    def mappings(self) -> int:
        """How many memories are mapped now, own ones included."""
        return len(self._mapped)

    def obstacle(self, uuid: bytes) -> str:
        return "" if uuid in self._sees else "this process does not see the peer's GPU"

    def allocate(self, size: int) -> Memory:
        descriptor = os.memfd_create("fake-gpu")
        os.ftruncate(descriptor, size)
        memory = self.map(descriptor, size)
        self._descriptors[memory.address] = descriptor
        return Memory(memory.address, size, handle=1)

    def export(self, memory: Memory) -> int:
        return os.dup(self._descriptors[memory.address])

    def map(self, descriptor: int, size: int) -> Memory:
        if os.fstat(descriptor).st_size < size:
            raise DriverError("the descriptor is of less memory")
        mapped = mmap.mmap(descriptor, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._mapped[address] = mapped
        return Memory(address, size)

    def unmap(self, memory: Memory) -> None:
        self._mapped.pop(memory.address).close()
        if memory.handle:
            os.close(self._descriptors.pop(memory.address))

    def copy(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            for row in range(block.rows):
                source, target = (
                    block.source + row * block.source_pitch,
                    block.target + row * block.target_pitch,
                )
                ctypes.memmove(target, source, block.width)

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)


class FakePool:
    """A pool of `count` pages and a proof page on a fake GPU, and its backend."""

    def __init__(self, folder: str, count: int, driver: FakeDriver | None = None) -> None:
        self.driver = driver or FakeDriver()
        self.memory = Allocation.new(self.driver, (count + 1) * PAGE)
        address = self.memory.memory.address
        self.area = DeviceArea(address, PAGE, count, 0, self.memory)
        nowhere = Area(np.empty((1, PAGE), np.uint8))
        self.backend = CudaIpcBackend(Site(nowhere, folder, wire=None, device=self.area))  # type: ignore[arg-type]

    @property
    def pages(self) -> NDArray[np.uint8]:
        """A copy of the bytes of all pages, uint8 [count + 1, PAGE]."""
        data = self.driver.read(self.area.address, (self.area.count + 1) * PAGE)
        return np.frombuffer(data, np.uint8).reshape(-1, PAGE)

    def fill(self, pages: NDArray[np.uint8]) -> None:
        """The pages get the bytes of `pages`, uint8 [count + 1, PAGE]."""
        ctypes.memmove(self.area.address, pages.tobytes(), pages.nbytes)
