"""Where the tensors of an update come from: a folder, bytes, shared memory, a GPU's memory, or a group of
processes. All are copied to memory of the host that is this engine's own: from then on nobody else can change
them, or take them away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.common.errors import ConfigError, InvalidRequest
from eyas.common.machine.gpus import number_of
from eyas.common.weights import (
    BytesSource,
    DeviceBuffer,
    DeviceSource,
    FolderSource,
    JoinGroup,
    SharedSource,
    Source,
)
from eyas.engine.checkpoint.folder import weight_files
from eyas.engine.checkpoint.host_tensors import HostTensors, laid_out, read_bytes, read_files
from kv_transfer.gpu.cuda import CudaDriver
from kv_transfer.gpu.driver import CopyBlock, DriverError

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class WeightSources:
    """The sources that an engine on this device can read."""

    device: str

    def read(self, source: Source) -> HostTensors:
        """A copy of all tensors; page-locked, if a GPU is to read it. Raises EyasError, which says what is
        wrong.
        """
        try:
            read = self._read(source)
            if self.device != "cpu" and not isinstance(source, DeviceSource):
                read.lock(self.device)
        except (ConfigError, DriverError, OSError) as error:
            raise InvalidRequest(str(error), param=source.param) from None
        return read

    def _read(self, source: Source) -> HostTensors:
        match source:
            case FolderSource(path=path):
                return read_files(weight_files(Path(path)))
            case BytesSource(files=files):
                return read_bytes(files)
            case SharedSource():
                return _shared(source)
            case DeviceSource(buffers=buffers):
                if self.device == "cpu":
                    raise ConfigError("this worker has no GPU that could read another process's")
                return from_device(buffers, self.device)
        raise ConfigError(f"{type(source).__name__}: not on this worker")

    def join(self, command: JoinGroup) -> None:
        """Joins a group of processes, of which rank 0 gives weights."""
        raise InvalidRequest("groups: not on this worker")

    def leave(self, group: str) -> None:
        """Leaves it."""
        raise InvalidRequest("groups: not on this worker")


def from_device(buffers: Sequence[DeviceBuffer], device: str) -> HostTensors:
    """A copy of buffers of this machine's GPUs. Raises DriverError if one cannot be reached, InvalidRequest
    if its tensors are not within it.
    """
    metas = [meta for buffer in buffers for meta in buffer.tensors]
    read = HostTensors(laid_out((meta.name, meta.dtype, meta.shape) for meta in metas))
    read.lock(device)
    driver = CudaDriver(number_of(device))
    opened: dict[bytes, int] = {}
    try:
        blocks = []
        for buffer in buffers:
            if reason := driver.obstacle(bytes.fromhex(buffer.gpu)):
                raise ConfigError(f"the GPU {buffer.gpu}: {reason}")
            if buffer.handle not in opened:
                opened[buffer.handle] = driver.open_handle(buffer.handle)
            for meta in buffer.tensors:
                place = read.places[meta.name]
                if not 0 <= meta.start <= buffer.nbytes - place.nbytes:
                    raise InvalidRequest(f"tensor {meta.name} is not within its buffer")
                there = opened[buffer.handle] + buffer.offset + meta.start
                if place.nbytes:
                    blocks.append(CopyBlock(there, read.tensor(meta.name).data_ptr(), place.nbytes))
        driver.copy_host(blocks, out=True)
    finally:
        for address in opened.values():
            driver.close_handle(address)
    return read


def _shared(source: SharedSource) -> HostTensors:
    """Raises InvalidRequest for a path outside shared memory, and for bytes of another digest."""
    paths = [Path(path).resolve() for path in source.paths]
    for path in paths:
        if not path.is_relative_to(SHARED_MEMORY):
            raise InvalidRequest(f"{path} is not in {SHARED_MEMORY}", param=source.param)
    for path, digest in zip(paths, source.digests, strict=False):
        if digest and _digest(path) != digest:
            raise InvalidRequest(f"the bytes of {path} are not those of its digest", param=source.param)
    return read_files(paths)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
