"""Messages of gateways and workers about weights that change while a cluster serves.

An update has three steps on every worker. It is prepared: read, checked and rehearsed while the old weights
serve. Then the worker is closed: it takes no new request, and those that it has end. At last it is committed,
and the worker opens again with the new weights. Until the first commit the update may be dropped, and
everything is as it was.
"""

from __future__ import annotations

import enum
from typing import ClassVar

import msgspec

from eyas.common.wire.message import TaggedMessage, WireFailure

PREPARE_S = 900.0
"""To read and rehearse the weights of a large model; what is prepared stays as long for those that follow."""

JOIN_S = 30.0
"""For all processes of a group to meet, unless a request says how long."""


class Running(enum.StrEnum):
    """How running requests go on when new weights come."""

    DRAIN = "drain"  # they are waited for
    ABORT = "abort"  # they fail
    RESTART = "restart"  # those whose callers have no token begin again with the new weights; others fail


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
"""What safetensors files call dtypes, by torch's names."""


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
    """Buffers of a process that keeps them until the update has been answered."""

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
    """Reads, checks and rehearses new weights. `whole`: all of the model's; else tensors that are missing
    stay as they are.
    """

    version: str
    generation: int
    source: Source
    whole: bool


class CloseForWeights(TaggedMessage, frozen=True):
    """Takes no new request, and answers when nothing runs: after `wait_s` at most, or it opens again. It also
    does if nothing follows for `hold_s`, which the same call begins anew. `digest`: of the prepared weights.
    """

    digest: str
    running: Running
    wait_s: float
    hold_s: float


class CommitWeights(TaggedMessage, frozen=True):
    """Puts the prepared weights of this digest in the place of the old ones, and opens."""

    digest: str


class DropWeights(TaggedMessage, frozen=True):
    """Forgets the prepared weights of this digest, and opens."""

    digest: str


class ReadWeight(TaggedMessage, frozen=True):
    """The first `count` numbers of a tensor as it was stored."""

    name: str
    count: int


class CheckJoin(TaggedMessage, frozen=True):
    """Whether the worker could join a group of that name: a join waits until all of its processes come."""

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
    """The answer to a command. `digest`, `tensors`, `nbytes`: of prepared weights. `seconds`: that it took;
    of a commit, how long no step could run. `requests`: that were ended. `numbers`: of a tensor.
    """

    digest: str = ""
    tensors: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    requests: int = 0
    numbers: tuple[float, ...] = ()
    failure: WireFailure | None = None
