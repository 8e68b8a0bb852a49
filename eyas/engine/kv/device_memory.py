"""Memory of the CUDA driver as tensors: what torch's own allocator gives cannot be mapped by other
processes."""

from __future__ import annotations

import torch

from kv_transfer.gpu.driver import GpuMemory


class _DeviceBytes:
    """What `torch.as_tensor` reads of memory that is not torch's (CUDA Array Interface, version 3)."""

    def __init__(self, memory: GpuMemory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.size,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "strides": None,
            "version": 3,
        }


def bytes_of(memory: GpuMemory, device: str) -> torch.Tensor:
    """uint8 [size] over `memory`, which is of the GPU `device` and must live longer than the tensor."""
    return torch.as_tensor(_DeviceBytes(memory), device=device)
