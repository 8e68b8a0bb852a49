"""Tensors that a trainer gives servers: on their machine files of tensors in shared memory, and buffers of a
GPU; from elsewhere tensors that a group's rank 0 broadcasts.

The first two become items of `serialized_named_tensors` (`/update_weights_from_tensor`). Tensors are torch's.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from eyas.common.config import SHARED_MEMORY
from eyas.common.errors import ConfigError
from eyas.common.weights import DTYPES, DeviceBuffer, TensorMeta

HANDLE_BYTES = 64


class SharedTensors:
    """Tensors in a safetensors file in shared memory, for `load_format` "shm". A context manager: the file
    is gone at its end, and the update must have been answered. `path`, `digest`: for the body.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        """`tensors`: contiguous, on the CPU."""
        from safetensors.torch import save_file

        path = Path(SHARED_MEMORY) / f"eyas-update-{os.getpid()}-{uuid.uuid4().hex}.safetensors"
        self.path = str(path)
        try:
            save_file(dict(tensors), path)
            with path.open("rb") as file:
                self.digest = hashlib.file_digest(file, "blake2b").hexdigest()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Removes the file."""
        Path(self.path).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DeviceTensors:
    """Tensors of a GPU for `update_weights`, as of `device_buffers`, which says what must hold of them."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.buffers = device_buffers(tensors)
        self._tensors = dict(tensors)  # which stay


class BroadcastTensors:
    """Tensors for `update_weights` that rank 0 of `group` broadcasts meanwhile, in this order, after all
    workers have joined it. `shapes`: of each name the dtype and the sizes.
    """

    def __init__(self, group: str, tensors: Mapping[str, Any]) -> None:
        """`tensors`: of which nothing but dtypes and sizes is read."""
        self.group = group
        self.shapes = {
            name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in tensors.items()
        }


WeightsSource = str | SharedTensors | DeviceTensors | BroadcastTensors | Sequence[bytes]
"""A folder, tensors by one of these ways, or safetensors files as bytes."""


def device_buffers(tensors: Mapping[str, Any]) -> list[str]:
    """Tensors of a GPU for `load_format` "cuda_ipc": nothing is copied. They must stay as they are until the
    update has been answered, and what wrote them must be done (`torch.cuda.synchronize`).

    Raises ConfigError for one that is not contiguous, of a dtype that weights do not have, or whose memory
    cannot be shared.
    """
    return [msgspec.json.encode(_buffer(name, tensor)).decode() for name, tensor in tensors.items()]


def _buffer(name: str, tensor: Any) -> DeviceBuffer:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(f"tensor {name} is of {dtype}, which is no dtype of weights ({', '.join(DTYPES)})")
    if not tensor.is_contiguous():
        raise ConfigError(f"tensor {name} is not contiguous")
    cuda, address = ctypes.CDLL("libcuda.so.1"), tensor.data_ptr()
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.create_string_buffer(HANDLE_BYTES)
    status = cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    if status or cuda.cuIpcGetMemHandle(handle, base):
        raise ConfigError(f"the memory of tensor {name} cannot be shared (expandable segments cannot be)")
    gpu = cuda_uuid(cuda, tensor.get_device())
    meta = TensorMeta(name, DTYPES[dtype], tuple(tensor.shape))
    return DeviceBuffer(handle.raw, address - base.value, tensor.nbytes, gpu, (meta,))


def cuda_uuid(cuda: Any, ordinal: int) -> str:
    """The name of a GPU of this process in all processes, in hex. Raises ConfigError if there is none."""
    device, name = ctypes.c_int(), ctypes.create_string_buffer(16)
    if cuda.cuDeviceGet(ctypes.byref(device), ordinal) or cuda.cuDeviceGetUuid_v2(name, device):
        raise ConfigError(f"there is no GPU {ordinal}")
    return name.raw.hex()
