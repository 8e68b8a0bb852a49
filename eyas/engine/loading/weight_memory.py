"""Memory of a GPU that torch takes weights from, and that can leave the GPU while its addresses stay.

Graphs hold the addresses of weights, so a model that sleeps keeps them: every block that torch asks for is a
`DeviceAllocation`, whose bytes go to page-locked memory of the host and come back into new bytes at the same
place. What a block holds is not looked at: what torch keeps of a load's temporary tensors is moved too.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

from eyas.common.errors import ConfigError
from eyas.engine.kv.pinned import PIECE_BYTES, host_bytes
from kv_transfer.gpu.driver import CopyBlock, DeviceAllocation, DriverError, GpuDriver

# The forms that torch calls: void *(ssize_t size, int device, stream), void (void *, size_t, int, stream).
_TAKE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_GIVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class WeightBlocks:
    """The blocks, by address. Of the host's memory it takes as much as they have when they first leave, and
    keeps it: locking it takes longer than a copy.
    """

    def __init__(self, driver: GpuDriver, device: torch.device) -> None:
        self._driver = driver
        self._device = device
        self._blocks: dict[int, DeviceAllocation] = {}
        self._host: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Bytes of all blocks."""
        return sum(block.memory.size for block in self._blocks.values())

    def take(self, size: int) -> int | None:
        """The address of a new block of at least `size` bytes; None: there is no room."""
        try:
            block = DeviceAllocation.new(self._driver, size)
        except DriverError:
            return None
        self._blocks[block.memory.address] = block
        return block.memory.address

    def give(self, address: int) -> None:
        """Frees the block at `address`."""
        self._blocks.pop(address).free()

    def release(self) -> int:
        """Copies every block to the host and gives its bytes back. Returns how many left.

        No kernel may use a block before `restore`. Raises ConfigError if the host has no room to lock; then
        nothing has changed.
        """
        size = self.size
        if self._host is None or self._host.nbytes < size:
            self._host = host_bytes(size, self._device)
        try:
            self._driver.copy_host(self._copies(out=True), out=True)
        except DriverError as error:
            raise ConfigError(f"weights cannot be copied to the host: {error}") from None
        for block in self._blocks.values():
            block.empty()
        return size

    def restore(self) -> int:
        """New bytes at the same addresses, and in them what was there. Returns how many came back.

        Raises ConfigError if the GPU has no room, or a copy fails; then all of them are still on the host.
        """
        refilled: list[DeviceAllocation] = []
        try:
            for block in self._blocks.values():
                block.refill()
                refilled.append(block)
            self._driver.copy_host(self._copies(out=False), out=False)
        except DriverError as error:
            for block in refilled:
                block.empty()
            raise ConfigError(f"no room for {self.size / 2**30:.1f} GiB of weights: {error}") from None
        return self.size

    def _copies(self, *, out: bool) -> list[CopyBlock]:
        assert self._host is not None
        copies, host, at = [], self._host.data_ptr(), 0
        for block in self._blocks.values():
            there, left = block.memory.address, block.memory.size
            while left:
                size = min(left, PIECE_BYTES - at % PIECE_BYTES)
                source, target = (there, host + at) if out else (host + at, there)
                copies.append(CopyBlock(source, target, size))
                there, at, left = there + size, at + size, left - size
        return copies


class WeightMemory:
    """Memory of weights: what torch allocates within `filling` comes from its blocks, as long as it lives."""

    def __init__(self, driver: GpuDriver, device: torch.device) -> None:
        self._blocks = blocks = WeightBlocks(driver, device)
        self._device = device
        # They hold Python's lock while they run; torch's allocator holds its own then, so no other thread may
        # free tensors of this GPU within `filling`.
        self._take = _TAKE(lambda size, device, stream: blocks.take(size))
        self._give = _GIVE(lambda address, size, device, stream: blocks.give(address))
        take, give = (ctypes.cast(each, ctypes.c_void_p).value or 0 for each in (self._take, self._give))
        self._allocator = torch._C._cuda_customAllocator(take, give)
        self._pool = torch.cuda.MemPool(self._allocator)

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """This thread's tensors of the GPU come from the blocks meanwhile."""
        with torch.cuda.use_mem_pool(self._pool, self._device):
            yield

    @property
    def size(self) -> int:
        """Bytes that are taken from the GPU."""
        return self._blocks.size

    def release(self) -> int:
        """See `WeightBlocks.release`; it waits until all kernels that were launched have ended."""
        torch.cuda.synchronize(self._device)
        return self._blocks.release()

    def restore(self) -> int:
        """See `WeightBlocks.restore`."""
        return self._blocks.restore()
