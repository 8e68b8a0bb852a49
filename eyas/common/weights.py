"""Messages of gateways and workers about weights that change while a cluster serves.

An update has three steps on every worker. Prepare: the new weights are read, checked and rehearsed while the
old ones serve. Close: the worker accepts no new requests, and its current ones end. Commit: the worker
switches to the new weights and opens again. Until the first commit the update may be dropped without effect.
"""

from __future__ import annotations

import enum
from typing import ClassVar

import msgspec

from eyas.common.wire.message import TaggedMessage, WireFailure

PREPARE_S = 900.0
"""The time limit to read and rehearse the weights of a large model, and how long prepared weights are
kept.
"""

JOIN_S = 30.0
"""The time limit for all processes to join a group, unless a request sets it."""


class Running(enum.StrEnum):
    """What happens to running requests when new weights are committed."""

    DRAIN = "drain"  # the update waits until they end
    ABORT = "abort"  # they fail
    RESTART = "restart"  # those that have sent no token start again with the new weights; others fail


DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
"""The names of dtypes in safetensors files, by torch's names."""


# --- where new weights are ------------------------------------------------------------------------------


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's name, its dtype as safetensors files name it, and its shape. `start`: its first byte in a
    flat buffer, where there is one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0


class FolderSource(TaggedMessage, frozen=True):
    """The safetensors files of a folder, on each worker's machine. `param`, of every source: the field of an
    HTTP body that says where it is.
    """

    path: str
    param: ClassVar[str] = "model_path"


class BytesSource(TaggedMessage, frozen=True):
    """Safetensors files, whole, each as bytes."""

    files: tuple[bytes, ...]
    param: ClassVar[str] = "serialized_named_tensors"


class SharedSource(TaggedMessage, frozen=True):
    """Safetensors files in shared memory (/dev/shm) of the workers' machine. `digests`: of each file, as
    `eyas.client.weights` makes them; empty: they are not compared.
    """

    paths: tuple[str, ...]
    digests: tuple[str, ...] = ()
    param: ClassVar[str] = "serialized_named_tensors"


class DeviceBuffer(msgspec.Struct, frozen=True):
    """A flat buffer of tensors in the memory of a GPU of this machine. `handle`: of the allocation, by CUDA
    IPC; `offset`: of the buffer's first byte there. `gpu`: its UUID.
    """

    handle: bytes
    offset: int
    nbytes: int
    gpu: str
    tensors: tuple[TensorMeta, ...]


class DeviceSource(TaggedMessage, frozen=True):
    """Buffers of another process, which must keep them until the update has been answered."""

    buffers: tuple[DeviceBuffer, ...]
    param: ClassVar[str] = "serialized_named_tensors"


class GroupSource(TaggedMessage, frozen=True):
    """Tensors that rank 0 of a `torch.distributed` group broadcasts, in this order."""

    group: str
    tensors: tuple[TensorMeta, ...]
    param: ClassVar[str] = "names"


Source = FolderSource | BytesSource | SharedSource | DeviceSource | GroupSource


# --- commands -------------------------------------------------------------------------------------------


class PrepareWeights(TaggedMessage, frozen=True):
    """Reads, checks and rehearses new weights. `whole`: the source has all tensors of the model; else missing
    tensors stay unchanged.
    """

    version: str
    generation: int
    source: Source
    whole: bool


class CloseForWeights(TaggedMessage, frozen=True):
    """Closes the worker to new requests, and answers when no request runs.

    The worker opens again if requests still run after `wait_s`, or if no other command arrives within
    `hold_s`; repeating this command restarts `hold_s`. `digest`: of the prepared weights.
    """

    digest: str
    running: Running
    wait_s: float
    hold_s: float


class CommitWeights(TaggedMessage, frozen=True):
    """Replaces the weights by the prepared ones with this digest, and opens the worker."""

    digest: str


class DropWeights(TaggedMessage, frozen=True):
    """Discards the prepared weights with this digest, and opens the worker."""

    digest: str


class ReadWeight(TaggedMessage, frozen=True):
    """The first `count` numbers of a tensor as it was stored."""

    name: str
    count: int


class CheckJoin(TaggedMessage, frozen=True):
    """Checks that the worker can join a group, before all join: a join waits for all of its processes."""

    group: str
    backend: str


class JoinGroup(TaggedMessage, frozen=True):
    """Joins a `torch.distributed` group as `rank` of `size`, whose rank 0 listens at `address`."""

    group: str
    address: str
    rank: int
    size: int
    backend: str
    wait_s: float = JOIN_S


class LeaveGroup(TaggedMessage, frozen=True):
    """Leaves a group."""

    group: str


WeightsCommand = (
    PrepareWeights
    | CloseForWeights
    | CommitWeights
    | DropWeights
    | ReadWeight
    | CheckJoin
    | JoinGroup
    | LeaveGroup
)


class WeightsReply(TaggedMessage, frozen=True):
    """The answer to a command. `digest`, `tensors`, `nbytes`: of prepared weights. `seconds`: the duration;
    of a commit, how long no step could run. `requests`: the number that were ended. `numbers`: of a tensor.
    """

    digest: str = ""
    tensors: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    requests: int = 0
    numbers: tuple[float, ...] = ()
    failure: WireFailure | None = None
