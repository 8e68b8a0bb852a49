"""The seam inside the gateway: what the HTTP and gRPC fronts ask of the machinery behind them.

It knows tokens and workers. It refuses to know text, HTTP, protobuf, or how a request is routed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from eyas.common.errors import EyasError
from eyas.common.types import Entry, GenerationRequest, WorkerInfo
from gateway.router import Candidate


class Health(msgspec.Struct, frozen=True):
    """`problem`: the sentence why a request sent now would fail, empty if it would succeed; `degraded`: what
    a request that succeeds does without.
    """

    problem: str = ""
    degraded: str = ""


class GenerationStream(Protocol):
    """One admitted request. Its reader owns it and calls `aclose` when done, however it ended."""

    def __aiter__(self) -> AsyncIterator[Entry]:
        """Entries; each output index of each choice exactly once and in order.

        Ends after every choice finished or was cancelled. Raises EyasError if the request fails, is out of
        time, or if its reader fell so far behind that the bounded buffer of the stream is full.
        """
        ...

    async def cancel(self, choice: int | None = None) -> None:
        """Ends one choice, or (None) the whole request, wherever it is. Idempotent."""
        ...

    def fail(self, error: EyasError) -> None:
        """Ends the stream with `error`, once what has come so far is read."""
        ...

    async def aclose(self) -> None:
        """Cancels what still runs and frees the stream. Idempotent."""
        ...


class Backend(Protocol):
    """Whatever turns requests into tokens: the cluster, or a script in a test."""

    async def start(self, request: GenerationRequest) -> GenerationStream:
        """Returns once every leg has admitted the request; raises EyasError (Overloaded, ...) before that.

        Cancelling the call cancels every leg.
        """
        ...

    async def models(self) -> list[WorkerInfo]:
        """The workers known now, and those that return: from the latest snapshot, it never waits."""
        ...

    def links(self) -> list[Candidate]:
        """The same workers with this gateway's lines to them."""
        ...

    def health(self) -> Health:
        """Whether a request sent now would succeed, from what is known already: never waits."""
        ...
