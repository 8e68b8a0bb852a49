"""Device memory that every rank of a group maps: one buffer per rank, whose address all ranks know.

It uses plain CUDA memory and its inter-process handles (CUDA driver API, "Memory Management":
cuIpcGetMemHandle), no multicast.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Self

import torch
import torch.distributed as dist

HANDLE_BYTES = 64
LAZY_ENABLE_PEER_ACCESS = 1
GRANULE_BYTES = 2 * 1024 * 1024
"""The driver cuts smaller allocations out of one block, whose handle would lead to the block's start."""


class _MemoryHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


class _DriverError(Exception):
    """A call of the CUDA driver failed."""


class PeerMemory:
    """This rank's buffer and its mappings of the others', until `close`.

    `addresses` int64 [ranks], on the device: where this process sees each rank's buffer. They start zeroed.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocates this rank's own buffer; `share` completes the object."""
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._device = device
        self._opened: list[int] = []
        own = ctypes.c_uint64()
        size = -(-size // GRANULE_BYTES) * GRANULE_BYTES
        self._call("cuMemAlloc_v2", ctypes.byref(own), ctypes.c_size_t(size))
        self._own = own.value
        self._call("cuMemsetD8_v2", own, ctypes.c_ubyte(0), ctypes.c_size_t(size))
        torch.cuda.synchronize(device)
        self.addresses = torch.empty(0, dtype=torch.int64, device=device)

    @classmethod
    def share(cls, size: int, device: torch.device) -> Self | None:
        """Shares `size` bytes per rank over the default process group. None on all ranks if one cannot."""
        memory, failure = None, ""
        handle = torch.zeros(HANDLE_BYTES, dtype=torch.uint8, device=device)
        try:
            memory = cls(size, device)
            handle.copy_(memory._handle())
        except (_DriverError, OSError) as error:
            failure = str(error)
        handles = [torch.empty_like(handle) for _ in range(dist.get_world_size())]
        dist.all_gather(handles, handle)
        if memory is not None:
            try:
                memory._map([bytes(each.tolist()) for each in handles])
            except _DriverError as error:
                failure = str(error)
        if _on_every_rank(not failure, device):
            return memory
        logging.getLogger("eyas.engine").warning(
            "ranks exchange through NCCL: %s", failure or "a peer cannot"
        )
        _release(memory, device)
        return None

    def close(self) -> None:
        """Unmaps the peers' buffers and frees the own one. All ranks call it, when no kernel uses them."""
        _release(self, self._device)

    def _handle(self) -> torch.Tensor:
        handle = _MemoryHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self._own))
        return torch.tensor(list(handle.bytes), dtype=torch.uint8)

    def _map(self, handles: list[bytes]) -> None:
        """Maps the buffers behind `handles` [ranks] and sets `addresses`."""
        addresses = []
        for rank, handle in enumerate(handles):
            address = ctypes.c_uint64(self._own)
            if rank != dist.get_rank():
                theirs = _MemoryHandle.from_buffer_copy(handle)
                flags = ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS)
                self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), theirs, flags)
                self._opened.append(address.value)
            addresses.append(address.value)
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=self._device)

    def _unmap(self) -> None:
        torch.cuda.synchronize(self._device)
        for address in self._opened:
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def _free(self) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(self._own))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code != 0:
            raise _DriverError(f"{name} answered {code}")


def _on_every_rank(fine: bool, device: torch.device) -> bool:
    """True if `fine` is true on every rank."""
    votes = torch.tensor([int(fine)], device=device)
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return bool(votes.item())


def _release(memory: PeerMemory | None, device: torch.device) -> None:
    """Gives back what this rank holds. Buffers are freed only after every rank has unmapped them."""
    if memory is not None:
        memory._unmap()
    dist.barrier(device_ids=[device.index])
    if memory is not None:
        memory._free()
