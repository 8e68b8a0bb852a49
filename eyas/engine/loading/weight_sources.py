"""Where the tensors of an update come from: a folder, bytes, shared memory, a GPU's memory, or a group of
processes. All are copied to memory of the host that is this engine's own: from then on nobody else can change
them, or take them away.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
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
from eyas.engine.checkpoint.host_tensors import (
    HostFile,
    HostTensors,
    Room,
    TensorPlace,
    laid_out,
    read_bytes,
    read_files,
)
from eyas.engine.kv.pinned import short_pieces
from kv_transfer.gpu.cuda import CudaDriver
from kv_transfer.gpu.driver import CopyBlock, DriverError

SHARED_MEMORY = Path("/dev/shm")


class WeightSources:
    """The sources that an engine on this device can read, and the groups that it is in."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._groups: dict[str, MetGroup] = {}
        self._spare: HostTensors | None = None

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

    def keep(self, spare: HostFile | None) -> None:
        """Memory that nothing reads any more: the next update takes it if a GPU has it page-locked, and the
        tensors are as large. None: what there is of it goes.
        """
        self._spare = spare if isinstance(spare, HostTensors) and self._device != "cpu" else None

    def _room(self, places: dict[str, TensorPlace]) -> HostTensors:
        spare, self._spare = self._spare, None
        if spare is not None and spare.places == places:
            return spare
        del spare  # before other memory is taken
        return HostTensors(places)

    def _read(self, source: Source) -> HostTensors:
        match source:
            case FolderSource(path=path):
                return read_files(weight_files(Path(path)), self._room)
            case BytesSource(files=files):
                return read_bytes(files, self._room)
            case SharedSource():
                return _shared(source, self._room)
            case DeviceSource(buffers=buffers):
                if self._device == "cpu":
                    raise ConfigError("this worker has no GPU that could read another process's")
                return from_device(buffers, self._device, self._room)
            case GroupSource():
                return self._received(source)

    def _received(self, source: GroupSource) -> HostTensors:
        """The tensors that rank 0 broadcasts. Raises InvalidRequest if the group is not there, or breaks."""
        group = self._groups.get(source.group)
        if group is None:
            text = f"this worker is not in the group {source.group!r} (/init_weights_update_group)"
            raise InvalidRequest(text, param="group_name")
        read = self._room(laid_out((meta.name, meta.dtype, meta.shape) for meta in source.tensors))
        try:
            if group.on_device:
                self._by_device(group, source, read)
            else:
                for meta in source.tensors:
                    group.broadcast(read.tensor(meta.name))
        except (RuntimeError, DriverError) as error:
            with contextlib.suppress(RuntimeError, ValueError):  # of a group that is broken
                self.leave(source.group)
            text = f"the group {source.group!r} broke, and was left: {error}"
            raise InvalidRequest(text, param="group_name") from None
        return read

    def _by_device(self, group: MetGroup, source: GroupSource, read: HostTensors) -> None:
        """Through the GPU. Its copies to memory that is not locked would hold up the steps' launches."""
        read.lock(self._device)
        driver = CudaDriver(number_of(self._device))
        for meta in source.tensors:
            there = torch.empty_like(read.tensor(meta.name), device=self._device)
            group.broadcast(there)
            driver.copy_host(list(_copies(read, meta.name, there.data_ptr())), out=True)

    def check_join(self, group: str, backend: str) -> None:
        """Raises InvalidRequest if it cannot join a group of that name."""
        if group in self._groups:
            raise InvalidRequest(f"this worker is in a group {group!r} already", param="group_name")
        if backend == "nccl" and self._device == "cpu":
            raise InvalidRequest("backend nccl needs a GPU: take gloo", param="backend")

    def join(self, command: JoinGroup) -> None:
        """Joins a group whose rank 0 gives weights. Raises InvalidRequest if not all come."""
        name = command.group
        self.check_join(name, command.backend)
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


def from_device(buffers: Sequence[DeviceBuffer], device: str, room: Room = HostTensors) -> HostTensors:
    """A copy of buffers of this machine's GPUs. Raises DriverError if one cannot be reached, InvalidRequest
    if it is not within what was shared.
    """
    metas = [meta for buffer in buffers for meta in buffer.tensors]
    read = room(laid_out((meta.name, meta.dtype, meta.shape) for meta in metas))
    read.lock(device)
    driver = CudaDriver(number_of(device))
    opened: dict[bytes, int] = {}
    try:
        blocks: list[CopyBlock] = []
        for buffer in buffers:
            if reason := driver.obstacle(bytes.fromhex(buffer.gpu)):
                raise ConfigError(f"the GPU {buffer.gpu}: {reason}")
            if buffer.handle not in opened:
                opened[buffer.handle] = driver.open_handle(buffer.handle)
            base = opened[buffer.handle]
            check_within(buffer, driver.extent(base), read)
            for meta in buffer.tensors:
                blocks += _copies(read, meta.name, base + buffer.offset + meta.start)
        driver.copy_host(blocks, out=True)
    finally:
        for address in opened.values():
            driver.close_handle(address)
    return read


def _copies(read: HostTensors, name: str, there: int) -> Iterator[CopyBlock]:
    """Yields the copies of a tensor from an address of a GPU, cut where the host's memory was locked."""
    here = read.tensor(name).data_ptr()
    for start, end in short_pieces(here, read.places[name].nbytes):
        yield CopyBlock(there + start, here + start, end - start)


def check_within(buffer: DeviceBuffer, size: int, read: HostTensors) -> None:
    """Raises InvalidRequest for a buffer that is not within its allocation of `size` bytes, and for tensors,
    as large as those of `read`, that are not within their buffer: a copy would read what was not shared.
    """
    if not 0 <= buffer.offset <= buffer.offset + buffer.nbytes <= size:
        place = f"{buffer.nbytes} bytes from {buffer.offset} on"
        raise InvalidRequest(f"a buffer of {place} is not within its memory, which has {size}")
    for meta in buffer.tensors:
        if not 0 <= meta.start <= buffer.nbytes - read.places[meta.name].nbytes:
            raise InvalidRequest(f"tensor {meta.name} is not within its buffer")


def _shared(source: SharedSource, room: Room) -> HostTensors:
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
    return read_files(paths, room)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
