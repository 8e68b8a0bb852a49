"""Commands of an operator to engines, beside requests: from a gateway to its workers and on to their engines.

A command is carried out between two steps, once, and has one outcome. Carrying one out again changes nothing.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from eyas.common.wire.message import TaggedMessage


class PauseMode(enum.StrEnum):
    """How an engine pauses, which is what becomes of its requests, by SGLang's names."""

    ABORT = "abort"  # each ends with the tokens that it has
    IN_PLACE = "in_place"  # they keep their KV and go on from there
    RETRACT = "retract"  # they go back to the queue without KV, and are computed anew


class MemoryTag(enum.StrEnum):
    """Memory that an engine can let go of, by SGLang's names."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


ALL_TAGS = tuple(MemoryTag)


MOST_PAUSE_S = 86_400.0
"""The longest limit of a pause: a day."""


class PauseGeneration(TaggedMessage, frozen=True):
    """No step runs from now on. Requests are still taken; they wait, each until its deadline.

    `limit_s`: the seconds after which steps run again by themselves, if memory is there (0: they do not).
    """

    mode: PauseMode
    limit_s: float = 0.0


class ContinueGeneration(TaggedMessage, frozen=True):
    """Steps run again."""


class ReleaseMemory(TaggedMessage, frozen=True):
    """Lets go of the memory of `tags`, once nothing uses it, within `wait_s` seconds. Its addresses stay.

    Weights go to the host's memory, KV is dropped with the prefix cache. Without a pause new requests are
    refused from then on.
    """

    tags: tuple[MemoryTag, ...] = ALL_TAGS
    wait_s: float = 1.0


class ResumeMemory(TaggedMessage, frozen=True):
    """Takes the memory of `tags` again: weights as they were, KV empty."""

    tags: tuple[MemoryTag, ...] = ALL_TAGS


ControlCommand: TypeAlias = PauseGeneration | ContinueGeneration | ReleaseMemory | ResumeMemory


class MemoryMove(msgspec.Struct, frozen=True):
    """Memory that left, or came back: `bytes` in `seconds`."""

    tag: MemoryTag
    bytes: int
    seconds: float


class ControlOutcome(msgspec.Struct, frozen=True):
    """The outcome of a command. `requests`: how many it ended, or sent back to the queue."""

    requests: int = 0
    moved: tuple[MemoryMove, ...] = ()
