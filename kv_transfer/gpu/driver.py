"""The calls of a GPU's driver that move pages: memory that other processes map, and copies.

`kv_transfer.gpu.cuda` implements the interface for CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class DriverError(Exception):
    """A call of the CUDA driver failed; the text says which, and why."""


@dataclass(frozen=True)
class GpuMemory:
    """Memory of a GPU that this process can reach. `handle`: the driver's; 0: another process owns it."""

    address: int
    size: int
    handle: int = 0


class CopyBlock(NamedTuple):
    """Bytes to copy: `rows` of `width` bytes each, which begin `*_pitch` bytes after each other."""

    source: int  # address
    target: int  # address
    width: int
    rows: int = 1
    source_pitch: int = 0
    target_pitch: int = 0


class GpuDriver(Protocol):
    """One GPU, as this process uses it. Every call may come from any thread; all raise DriverError."""

    @property
    def uuid(self) -> bytes:
        """Names the GPU in all processes and on all hosts; 16 bytes."""
        ...

    @property
    def ordinal(self) -> int:
        """The GPU's number in this process."""
        ...

    @property
    def pci_address(self) -> str:
        """Its place on the PCI bus: domain, bus, device and function, as "0000:1b:00.0"."""
        ...

    def rdma_capable(self, address: int) -> bool:
        """Whether network cards may be given the memory at `address`."""
        ...

    def bound(self) -> AbstractContextManager[None]:
        """The calling thread is on this GPU meanwhile, for libraries that ask which one it is on."""
        ...

    def obstacle(self, uuid: bytes) -> str:
        """Returns why this GPU cannot read the memory of the GPU `uuid`; empty: it can."""
        ...

    def allocate(self, size: int) -> GpuMemory:
        """Allocates at least `size` bytes of this GPU, not initialised, that can be exported."""
        ...

    def export(self, memory: GpuMemory) -> int:
        """A file descriptor that gives another process `memory`; the caller closes it."""
        ...

    def map(self, descriptor: int, size: int) -> GpuMemory:
        """Maps another process's memory. It lives as long as any process has it mapped."""
        ...

    def open_handle(self, handle: bytes) -> int:
        """The address here of memory that another process allocated and gave a CUDA IPC handle of.

        Its owner must keep it: it is gone with that process.
        """
        ...

    def close_handle(self, address: int) -> None:
        """Lets go of it."""
        ...

    def unmap(self, memory: GpuMemory) -> None:
        """Gives memory back, own or mapped. Nothing may use it any more."""
        ...

    def empty(self, memory: GpuMemory) -> GpuMemory:
        """Gives the bytes of own memory back and keeps its addresses, which nothing may touch meanwhile."""
        ...

    def refill(self, memory: GpuMemory) -> GpuMemory:
        """Puts new bytes, not initialised, behind the addresses of memory that is `empty`."""
        ...

    def register(self, address: int, size: int) -> int:
        """Lets kernels use memory of the host, whole pages of this process: the address by which they do."""
        ...

    def unregister(self, address: int) -> None:
        """Undoes `register` of the memory at `address`. No kernel may use it any more."""
        ...

    def copy(self, blocks: Sequence[CopyBlock]) -> None:
        """Copies between memories of GPUs, in any order; returns when all bytes are there."""
        ...

    def copy_host(self, blocks: Sequence[CopyBlock], *, out: bool) -> None:
        """Copies between this GPU and page-locked memory of the host, which is the target if `out`; returns
        when all bytes are there. Copies of several threads run in their order, one begins as another ends.
        """
        ...

    def read(self, address: int, size: int) -> bytes:
        """Bytes of a GPU."""
        ...


@dataclass
class DeviceAllocation:
    """Memory that was allocated or mapped, and the driver that it came from. Its addresses stay until `free`;
    its bytes may leave the GPU meanwhile. `away`: they have.
    """

    driver: GpuDriver
    memory: GpuMemory
    away: bool = False

    @classmethod
    def new(cls, driver: GpuDriver, size: int) -> DeviceAllocation:
        """Allocates at least `size` bytes, not initialised. Raises DriverError."""
        return cls(driver, driver.allocate(size))

    def export(self) -> int:
        """A file descriptor that gives another process the memory; the caller closes it."""
        return self.driver.export(self.memory)

    def empty(self) -> None:
        """Gives the bytes back and keeps the addresses; peers that have them mapped keep theirs."""
        self.memory = self.driver.empty(self.memory)
        self.away = True

    def refill(self) -> None:
        """New bytes behind the same addresses, not initialised. Raises DriverError if there is no room."""
        self.memory = self.driver.refill(self.memory)
        self.away = False

    def free(self) -> None:
        """Gives the memory back; peers that have it mapped keep theirs."""
        if not self.away:  # else only addresses are left, which end with the process
            self.driver.unmap(self.memory)
