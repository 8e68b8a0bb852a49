"""Where the tensors of an update come from: a folder, bytes, shared memory, a GPU's memory, or a group of
processes. All are copied to memory of the host that is this engine's own: from then on nobody else can change
them, or take them away.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from eyas.common.errors import ConfigError, InvalidRequest
from eyas.common.weights import (
    BytesSource,
    FolderSource,
    JoinGroup,
    SharedSource,
    Source,
)
from eyas.engine.checkpoint.folder import weight_files
from eyas.engine.checkpoint.host_tensors import HostTensors, read_bytes, read_files

SHARED_MEMORY = Path("/dev/shm")


class WeightSources:
    """The sources that one engine can read, and the groups that it is in."""

    def read(self, source: Source) -> HostTensors:
        """A copy of all tensors. Raises EyasError, which says what is wrong."""
        try:
            match source:
                case FolderSource(path=path):
                    return read_files(weight_files(Path(path)))
                case BytesSource(files=files):
                    return read_bytes(files)
                case SharedSource():
                    return _shared(source)
        except ConfigError as error:
            raise InvalidRequest(error.message, param=source.param) from None
        raise InvalidRequest(f"{type(source).__name__}: not on this worker")

    def join(self, command: JoinGroup) -> None:
        """Joins a group of processes, of which rank 0 gives weights."""
        raise InvalidRequest("groups: not on this worker")

    def leave(self, group: str) -> None:
        """Leaves it."""
        raise InvalidRequest("groups: not on this worker")


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
