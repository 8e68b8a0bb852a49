"""The replies of a worker to the requests that it was given.

The same records come from its engine to its front, and from there, by gRPC, to a gateway.
"""

from __future__ import annotations

from eyas.common.types import EngineTimings, FirstToken, KvHandle, TokenEntry
from eyas.common.wire.message import TaggedMessage, WireFailure


class RequestAdmitted(TaggedMessage, frozen=True, tag="Admitted"):
    """The request has a place in the queue."""

    id: str
    attempt: int


class RequestRejected(TaggedMessage, frozen=True, tag="Rejected"):
    """The request was refused; nothing of it is kept."""

    id: str
    attempt: int
    failure: WireFailure


class PagesLost(TaggedMessage, frozen=True, tag="Lost"):
    """The pages of this attempt did not arrive; the request keeps its place and waits for an `AttachKv`."""

    id: str
    attempt: int


class RequestFailed(TaggedMessage, frozen=True, tag="Failed"):
    """An admitted request, or one choice of it, ended without its last token."""

    id: str
    attempt: int
    failure: WireFailure
    choice: int | None = None


class StepReply(TaggedMessage, frozen=True, tag="Step"):  # a short name: it goes out at every step
    """The tokens of one engine step, for all its requests."""

    entries: tuple[TokenEntry, ...]


class PrefillStarted(TaggedMessage, frozen=True):
    """The pages of a prompt are allocated and offered; its first chunk runs."""

    id: str
    attempt: int
    handles: tuple[KvHandle, ...]


class PrefillDone(TaggedMessage, frozen=True):
    """The prompt is computed: token 0 of each choice."""

    id: str
    attempt: int
    choices: tuple[FirstToken, ...]
    timings: EngineTimings
