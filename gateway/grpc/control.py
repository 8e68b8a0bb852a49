"""Commands of an operator by gRPC, for the workers, and their outcomes as messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from eyas.common.errors import InvalidRequest
from eyas.common.wire.control import (
    ALL_TAGS,
    MOST_PAUSE_S,
    ControlOutcome,
    MemoryTag,
    PauseGeneration,
    PauseMode,
)
from protos import eyas_pb2

_MODES = {
    eyas_pb2.PAUSE_MODE_UNSPECIFIED: PauseMode.ABORT,
    eyas_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
    eyas_pb2.PAUSE_MODE_IN_PLACE: PauseMode.IN_PLACE,
    eyas_pb2.PAUSE_MODE_RETRACT: PauseMode.RETRACT,
}
_TAGS = {
    eyas_pb2.MEMORY_TAG_WEIGHTS: MemoryTag.WEIGHTS,
    eyas_pb2.MEMORY_TAG_KV_CACHE: MemoryTag.KV_CACHE,
}
_TAGS_TO_PB = {tag: pb for pb, tag in _TAGS.items()}


def pause_of(request: eyas_pb2.PauseGenerationRequest) -> PauseGeneration:
    """The command. Raises InvalidRequest for a mode that is not known, or a limit that is out of range."""
    if request.mode not in _MODES:
        raise InvalidRequest(f"mode has the unknown value {request.mode}", param="mode")
    if not 0 <= request.limit_s <= MOST_PAUSE_S:
        raise InvalidRequest(f"limit_s is not from 0 to {MOST_PAUSE_S:g}", param="limit_s")
    return PauseGeneration(_MODES[request.mode], request.limit_s)


def tags_of(tags: Iterable[int]) -> tuple[MemoryTag, ...]:
    """The tags; all if none is named. Raises InvalidRequest for one that this version does not have."""
    named = list(tags)
    if unknown := [tag for tag in named if tag not in _TAGS]:
        raise InvalidRequest(f"tags has the unknown value {unknown[0]}", param="tags")
    return tuple(_TAGS[tag] for tag in named) or ALL_TAGS


def moved_to_pb(outcomes: Mapping[str, ControlOutcome]) -> list[eyas_pb2.MovedMemory]:
    """What moved on each worker, by name."""
    return [
        eyas_pb2.MovedMemory(
            worker=worker, tag=_TAGS_TO_PB[moved.tag], bytes=moved.bytes, seconds=moved.seconds
        )
        for worker, outcome in outcomes.items()
        for moved in outcome.moved
    ]
