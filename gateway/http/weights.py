"""Routes by which a trainer changes the weights that serve, in SGLang's shapes, on all workers or on none.

An update answers when the new weights serve, or with what was wrong, and then the old ones do. The bodies
have SGLang's fields; `running`, `timeout` and `whole` are extensions.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from eyas.common.errors import EyasError, InvalidRequest
from eyas.common.weights import (
    JOIN_S,
    BytesSource,
    FolderSource,
    GroupSource,
    JoinGroup,
    Running,
    SharedSource,
    Source,
)
from gateway.backends.base import GenerationBackend
from gateway.formats.fields import RequestBody
from gateway.formats.openai_reply import error_body
from gateway.formats.weight_sources import (
    MOST_NAME,
    MOST_WAIT_S,
    WAIT_S,
    GroupBackend,
    device_source,
    group_source,
)
from gateway.http.openapi import JSON, Answerer, HttpEndpoint
from gateway.http.operators import OperatorBodies
from gateway.http.pages import json_response
from gateway.routing.weights import WeightsChange, WeightUpdate

MOST_BYTES = 32 * 2**20
MOST_INLINE = 15 * 2**20  # bytes of tensors in a body, as they travel to workers


class UpdateBody(RequestBody):
    """The fields of all updates."""

    weight_version: str | None = Field(None, max_length=MOST_NAME)
    """The name of the new weights, which every answer tells; without: the number of the update."""
    abort_all_requests: bool = False
    """True: as `running` "abort"."""
    flush_cache: bool = True
    """Cached pages of other weights are never read; false changes nothing."""
    running: Literal["drain", "abort", "restart"] = "drain"
    """What becomes of requests that run: they are waited for, or fail, or, if they have no token yet, begin
    again with the new weights."""
    timeout: float = Field(WAIT_S, ge=0, le=MOST_WAIT_S)
    """Seconds to wait for them; then the old weights serve on."""

    def update(self, source: Source, *, whole: bool) -> WeightUpdate:
        """The update of the body."""
        running = Running.ABORT if self.abort_all_requests else Running(self.running)
        return WeightUpdate(source, self.weight_version or "", whole, running, self.timeout)


class DiskBody(UpdateBody):
    """The body of /update_weights_from_disk."""

    model_path: str = Field(min_length=1)
    """A folder with safetensors files of all of the model's tensors, on the machine of each worker."""
    load_format: Literal["auto", "safetensors"] | None = None
    """How they are stored: as safetensors."""


class TensorBody(UpdateBody):
    """The body of /update_weights_from_tensor."""

    serialized_named_tensors: list[str] = Field(min_length=1, max_length=1024)
    """Of `load_format` "safetensors": files in base64; "shm": paths below /dev/shm of such files;
    "cuda_ipc": buffers of a GPU, as `eyas.client.weights` makes them."""
    load_format: Literal["safetensors", "shm", "cuda_ipc"] | None = None
    """How the tensors are given. Pickles, which SGLang takes, run code, and are refused."""
    digests: list[str] = []
    """Of the files in shared memory, blake2b in hex: they are compared."""
    whole: bool = False
    """True: a tensor that is missing is an error; else it stays as it is."""

    @property
    def source(self) -> Source:
        """Where the tensors are. Raises InvalidRequest for what is none."""
        match self.load_format:
            case "safetensors":
                return BytesSource(_decoded(self.serialized_named_tensors))
            case "shm":
                return SharedSource(tuple(self.serialized_named_tensors), tuple(self.digests))
            case "cuda_ipc":
                return device_source(self.serialized_named_tensors)
        text = "must be safetensors, shm or cuda_ipc: pickled tensors are not read, since they run code"
        raise InvalidRequest(f"load_format {text}", param="load_format")


class GroupBody(RequestBody):
    """The body of /init_weights_update_group."""

    master_address: str = Field(min_length=1)
    """The address where rank 0, the trainer, listens."""
    master_port: int = Field(ge=1, le=65535)
    """Its port."""
    rank_offset: int = Field(1, ge=1)
    """The rank of the first worker; each worker has one, whatever GPUs it has."""
    world_size: int = Field(ge=2, lt=2**31)
    """How many processes the group has, the trainer's among them."""
    group_name: str = Field("weight_update_group", min_length=1, max_length=MOST_NAME)
    """The group's name."""
    backend: GroupBackend = "nccl"
    """How tensors travel."""
    timeout: float = Field(JOIN_S, gt=0, le=MOST_WAIT_S)
    """Seconds for all of its processes to come."""


class LeaveBody(RequestBody):
    """The body of /destroy_weights_update_group."""

    group_name: str = "weight_update_group"
    """The group's name."""


class DistributedBody(UpdateBody):
    """The body of /update_weights_from_distributed."""

    names: list[str] = Field(min_length=1)
    """The tensors that rank 0 broadcasts, in this order."""
    dtypes: list[str]
    """Their dtypes, as torch names them."""
    shapes: list[list[Annotated[int, Field(ge=0, lt=2**63)]]]
    """Their shapes."""
    group_name: str = "weight_update_group"
    """The group that was made before."""
    whole: bool = False
    """True: a tensor that is missing is an error; else it stays as it is."""

    @property
    def source(self) -> GroupSource:
        """Raises InvalidRequest for lists that do not fit each other, and for a dtype that is none."""
        return group_source(self.group_name, self.names, self.dtypes, self.shapes)


class NameBody(RequestBody):
    """The body of /get_weights_by_name."""

    name: str = Field(min_length=1)
    """The tensor's name, as the model's files have it."""
    truncate_size: int = Field(100, ge=1, le=1_000_000)
    """How many of its first numbers."""


class WeightEndpoints:
    """The endpoints. Each turns a request into a response."""

    def __init__(self, backend: GenerationBackend, *, keyed: bool) -> None:
        """`keyed`: callers need a key. Else they must be of this machine."""
        self._backend = backend
        self._bodies = OperatorBodies(MOST_BYTES, "change the weights", keyed=keyed)

    def endpoints(self) -> list[HttpEndpoint]:
        """The rows of the route table that this class answers."""
        rows: list[tuple[str, Answerer, str, type[RequestBody]]] = [
            ("/update_weights_from_disk", self.from_disk, "New weights from a folder, as SGLang", DiskBody),
            ("/update_weights_from_tensor", self.from_tensor, "New weights from memory", TensorBody),
            ("/init_weights_update_group", self.join, "Workers join a group of processes", GroupBody),
            ("/destroy_weights_update_group", self.leave, "Workers leave it", LeaveBody),
            (
                "/update_weights_from_distributed",
                self.from_group,
                "New weights of a group",
                DistributedBody,
            ),
            ("/get_weights_by_name", self.read, "Numbers of a weight, as SGLang", NameBody),
        ]
        posts = [HttpEndpoint("POST", *row) for row in rows]
        version = HttpEndpoint("GET", "/get_weight_version", self.version, "The name of the weights")
        return [*posts, version, HttpEndpoint("GET", "/weight_version", self.version, "The same")]

    async def from_disk(self, request: Request) -> Response:
        """New weights from a folder."""
        body = await self._bodies.read(DiskBody, request)
        return await self._update(lambda: body.update(FolderSource(body.model_path), whole=True))

    async def from_tensor(self, request: Request) -> Response:
        """New weights from a body, from shared memory, or from a GPU of the workers' machine."""
        body = await self._bodies.read(TensorBody, request)
        return await self._update(lambda: body.update(body.source, whole=body.whole))

    async def from_group(self, request: Request) -> Response:
        """New weights that rank 0 of a group broadcasts."""
        body = await self._bodies.read(DistributedBody, request)
        return await self._update(lambda: body.update(body.source, whole=body.whole))

    async def join(self, request: Request) -> Response:
        """Workers join a group; answers when all have."""
        body = await self._bodies.read(GroupBody, request)
        address = f"{body.master_address}:{body.master_port}"
        name, size = body.group_name, body.world_size
        command = JoinGroup(name, address, body.rank_offset, size, body.backend, body.timeout)

        async def joined() -> dict[str, Any]:
            workers = await self._backend.weights.join(command)
            return {"message": f"{len(workers)} workers joined {name!r}", "workers": workers}

        return await _answered(joined)

    async def leave(self, request: Request) -> Response:
        """Workers leave a group."""
        body = await self._bodies.read(LeaveBody, request)

        async def left() -> dict[str, Any]:
            await self._backend.weights.leave(body.group_name)
            return {"message": f"the workers left {body.group_name!r}"}

        return await _answered(left)

    async def read(self, request: Request) -> Response:
        """The first numbers of a tensor, as a list. Raises NotFound for one that is not there."""
        body = await self._bodies.read(NameBody, request)
        return json_response(await self._backend.weights.read(body.name, body.truncate_size))

    async def version(self, _: Request) -> Response:
        """The name of the weights that answer, their generation and their digest."""
        newest = self._backend.weights.newest
        return json_response(
            {
                "weight_version": newest.version,
                "generation": newest.generation,
                "digest": newest.digest,
            }
        )

    async def _update(self, update: Callable[[], WeightUpdate]) -> Response:
        async def done() -> dict[str, Any]:
            return _described(await self._backend.weights.update(update()))

        return await _answered(done)


async def _answered(done: Callable[[], Awaitable[dict[str, Any]]]) -> Response:
    """SGLang's answer: `success` and `message`; of a failure with OpenAI's `error` beside them."""
    try:
        return json_response({"success": True, **await done()})
    except EyasError as error:
        body = msgspec.json.decode(error_body(error)) | {"success": False, "message": error.message}
        return Response(msgspec.json.encode(body), error.http_status, media_type=JSON)


def _described(change: WeightsChange) -> dict[str, Any]:
    weights = change.weights
    text = f"the weights are {weights.version!r} on {len(change.workers)} workers"
    if change.behind:
        text += f"; behind: {'; '.join(f'{worker}: {why}' for worker, why in change.behind.items())}"
    return {
        "message": text,
        "num_paused_requests": change.requests,
        "weight_version": weights.version,
        "generation": weights.generation,
        "digest": weights.digest,
        "tensors": change.tensors,
        "bytes": change.nbytes,
        "pause_seconds": round(change.seconds, 6),
        "workers": change.workers,
        "behind": change.behind,
    }


def _decoded(files: list[str]) -> tuple[bytes, ...]:
    try:
        decoded = tuple(base64.b64decode(file, validate=True) for file in files)
    except (binascii.Error, ValueError):
        raise InvalidRequest(
            "serialized_named_tensors must be base64", param="serialized_named_tensors"
        ) from None
    if sum(map(len, decoded)) > MOST_INLINE:
        text = f"serialized_named_tensors has more than {MOST_INLINE >> 20} MiB: put it into /dev/shm (shm)"
        raise InvalidRequest(text, param="serialized_named_tensors")
    return decoded
