"""The base of every record between a worker's front and its engine, and the replies to requests.

Replies come from an engine to its front, and from there, by gRPC, to a gateway.
"""

from __future__ import annotations

import msgspec

from eyas.common.errors import EyasError, from_code
from eyas.common.types import EngineTimings, FirstToken, KvHandle, TokenEntry


class TaggedMessage(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of every message: a tagged union member."""


class WireFailure(msgspec.Struct, frozen=True):
    """An `EyasError` by its wire name."""

    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: EyasError) -> WireFailure:
        """The error without its traceback, to send to another process."""
        return cls(error.code, error.message, error.param)

    def error(self) -> EyasError:
        """The error again, its class intact."""
        return from_code(self.code, self.message, self.param)


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
