"""Where the tensors of an update come from: a folder, bytes, shared memory, a GPU's memory, or a group of
processes. All are copied to memory of the host that is this engine's own: from then on nobody else can change
them, or take them away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from eyas.common.errors import ConfigError, InvalidRequest
from eyas.common.machine.gpus import number_of
from eyas.common.process_groups import MetGroup
from eyas.common.weights import (
    BytesSource,
    DeviceBuffer,
    DeviceSource,
    FolderSource,
    GroupSource,
    JoinGroup,
    SharedSource,
    Source,
)
from eyas.engine.checkpoint.folder import weight_files
from eyas.engine.checkpoint.host_tensors import HostTensors, laid_out, read_bytes, read_files
from kv_transfer.gpu.cuda import CudaDriver
from kv_transfer.gpu.driver import CopyBlock, DriverError

SHARED_MEMORY = Path("/dev/shm")


class WeightSources:
    """The sources that an engine on this device can read, and the groups that it is in."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._groups: dict[str, MetGroup] = {}

    def read(self, source: Source) -> HostTensors:
        """A copy of all tensors; page-locked, if a GPU is to read it. Raises EyasError, which says what is
        wrong.
        """
        try:
            read = self._read(source)
            if self._device != "cpu" and not isinstance(source, DeviceSource):
                read.lock(self._device)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=error.param or source.param) from None
        except (ConfigError, DriverError, OSError, ValueError) as error:  # ValueError: of a path, or a UUID
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
                if self._device == "cpu":
                    raise ConfigError("this worker has no GPU that could read another process's")
                return from_device(buffers, self._device)
            case GroupSource():
                return self._received(source)

    def _received(self, source: GroupSource) -> HostTensors:
        """What rank 0 broadcasts. Raises InvalidRequest if the group is not there, or breaks."""
        group = self._groups.get(source.group)
        if group is None:
            text = f"this worker is not in the group {source.group!r} (/init_weights_update_group)"
            raise InvalidRequest(text, param="group_name")
        read = HostTensors(laid_out((meta.name, meta.dtype, meta.shape) for meta in source.tensors))
        try:
            for meta in source.tensors:
                here = read.tensor(meta.name)
                if group.on_device:
                    there = torch.empty_like(here, device=self._device)
                    group.broadcast(there)
                    here.copy_(there)
                else:
                    group.broadcast(here)
        except RuntimeError as error:
            raise InvalidRequest(f"the group {source.group!r} broke: {error}", param="group_name") from None
        return read

    def join(self, command: JoinGroup) -> None:
        """Joins a group whose rank 0 gives weights. Raises InvalidRequest if not all come."""
        name = command.group
        if name in self._groups:
            raise InvalidRequest(f"this worker is in a group {name!r} already", param="group_name")
        if command.backend == "nccl" and self._device == "cpu":
            raise InvalidRequest("backend nccl needs a GPU: take gloo", param="backend")
        ranks = command.rank, command.size
        try:
            self._groups[name] = MetGroup(name, command.address, *ranks, command.backend, command.wait_s)
        except (RuntimeError, ValueError) as error:
            text = f"the group {name!r} did not meet at {command.address}: {str(error)[:300]}"
            raise InvalidRequest(text, param="master_address") from None

    def leave(self, group: str) -> None:
        """Leaves a group; nothing if it is in none of that name."""
        if (met := self._groups.pop(group, None)) is not None:
            met.leave()


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
    if len(source.digests) not in (0, len(paths)):
        raise InvalidRequest("digests must have one of each file, or none", param="digests")
    for path, digest in zip(paths, source.digests, strict=False):
        if digest and _digest(path) != digest:
            raise InvalidRequest(f"the bytes of {path} are not those of its digest", param=source.param)
    return read_files(paths)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
