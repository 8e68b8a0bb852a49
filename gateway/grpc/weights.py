"""Updates of weights by gRPC: a message as an update, and what came of it as a message."""

from __future__ import annotations

from eyas.common.errors import InvalidRequest
from eyas.common.weights import BytesSource, FolderSource, Running, SharedSource, Source
from gateway.routing.weights import WeightsChange, WeightUpdate
from protos import eyas_pb2

WAIT_S, MOST_WAIT_S = 300.0, 3600.0
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
    raise InvalidRequest("one of folder, files and shared must be given", param="folder")


def change_to_pb(change: WeightsChange) -> eyas_pb2.UpdateWeightsResponse:
    """What came of it."""
    return eyas_pb2.UpdateWeightsResponse(
        version=change.weights.version,
        generation=change.weights.generation,
        digest=change.weights.digest,
        requests=change.requests,
        pause_s=change.seconds,
        behind=list(change.behind),
    )
