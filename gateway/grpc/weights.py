"""Updates of weights by gRPC: a message as an update, and what came of it as a message."""

from __future__ import annotations

from eyas.common.cluster.names import is_address
from eyas.common.errors import InvalidRequest
from eyas.common.weights import BytesSource, FolderSource, JoinGroup, Running, SharedSource, Source
from gateway.formats.weight_sources import (
    BACKENDS,
    MOST_NAME,
    MOST_WAIT_S,
    WAIT_S,
    device_source,
    group_source,
)
from gateway.routing.weights import WeightsChange, WeightUpdate
from protos import eyas_pb2

_RUNNING = {
    eyas_pb2.RUNNING_REQUESTS_UNSPECIFIED: Running.DRAIN,
    eyas_pb2.RUNNING_REQUESTS_DRAIN: Running.DRAIN,
    eyas_pb2.RUNNING_REQUESTS_ABORT: Running.ABORT,
    eyas_pb2.RUNNING_REQUESTS_RESTART: Running.RESTART,
}


def update_of(request: eyas_pb2.UpdateWeightsRequest) -> WeightUpdate:
    """The update. Raises InvalidRequest, which names the field."""
    if request.running not in _RUNNING:
        raise InvalidRequest(f"running has the unknown value {request.running}", param="running")
    wait_s = request.wait_s if request.HasField("wait_s") else WAIT_S
    if not 0 <= wait_s <= MOST_WAIT_S:
        raise InvalidRequest(f"wait_s must be from 0 to {MOST_WAIT_S:g}", param="wait_s")
    if len(request.version) > MOST_NAME:
        raise InvalidRequest(f"version has more than {MOST_NAME} characters", param="version")
    source = _source(request)
    whole = request.whole or isinstance(source, FolderSource)
    return WeightUpdate(source, request.version, whole, _RUNNING[request.running], wait_s)


def _source(request: eyas_pb2.UpdateWeightsRequest) -> Source:
    match request.WhichOneof("source"):
        case "folder":
            return FolderSource(request.folder)
        case "files":
            return BytesSource(tuple(request.files.files))
        case "shared":
            return SharedSource(tuple(request.shared.paths), tuple(request.shared.digests))
        case "device":
            return device_source(request.device.buffers)
        case "broadcast":
            tensors = request.broadcast.tensors
            names, dtypes = [each.name for each in tensors], [each.dtype for each in tensors]
            return group_source(request.broadcast.group, names, dtypes, [each.shape for each in tensors])
    given = "one of folder, files, shared, device and broadcast must be given"
    raise InvalidRequest(given, param="folder")


def join_of(request: eyas_pb2.JoinWeightsGroupRequest) -> JoinGroup:
    """The command. Raises InvalidRequest, which names the field."""
    first = request.first_rank if request.HasField("first_rank") else 1
    backend = request.backend or BACKENDS[0]
    for wrong, field, text in (
        (not is_address(request.address), "address", "is HOST:PORT"),
        (not request.group, "group", "is required"),
        (len(request.group) > MOST_NAME, "group", f"has more than {MOST_NAME} characters"),
        (backend not in BACKENDS, "backend", f"is one of {', '.join(BACKENDS)}"),
        (first < 1, "first_rank", "is 1 at least: rank 0 is the trainer's"),
        (request.size < 2, "size", "is 2 at least"),
    ):
        if wrong:
            raise InvalidRequest(f"{field} {text}", param=field)
    return JoinGroup(request.group, request.address, first, request.size, backend)


def change_to_pb(change: WeightsChange) -> eyas_pb2.UpdateWeightsResponse:
    """The outcome of a change, as a message."""
    return eyas_pb2.UpdateWeightsResponse(
        version=change.weights.version,
        generation=change.weights.generation,
        digest=change.weights.digest,
        requests=change.requests,
        pause_s=change.seconds,
        behind=list(change.behind),
    )
