"""The interface between the gateway's fronts (HTTP, gRPC) and what makes tokens behind them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from eyas.common.errors import EyasError
from eyas.common.types import (
    Adapter,
    AdapterRoster,
    GenerationRequest,
    TokenEntry,
    WeightsInfo,
    WorkerInfo,
)
from eyas.common.weights import JoinGroup
from eyas.common.wire.control import ControlCommand, ControlOutcome
from gateway.routing.router import RouterCandidate
from gateway.routing.weights import WeightsChange, WeightUpdate


class BackendHealth(msgspec.Struct, frozen=True):
    """Whether a request sent now would succeed.

    `problem`: why it would fail, as a sentence; empty if it would succeed. `degraded`: what it would have to
    do without; empty if nothing. `paused`: that it would wait until generation goes on; empty if it would
    not.
    """

    problem: str = ""
    degraded: str = ""
    paused: str = ""


class FastPath(Protocol):
    """A short way for entries."""

    __slots__ = ()

    def offer(self, entry: TokenEntry, now: float) -> bool:
        """Takes an entry that came now (monotonic seconds): nothing else gets it then. False: it did not."""
        ...


Lanes = Callable[[int], FastPath | None]
"""The lane of a choice; None: it has none yet."""


class GenerationStream(Protocol):
    """The tokens of one admitted request. Its reader owns it and calls `aclose`, however it ended."""

    @property
    def tokens(self) -> int:
        """How many have come, those that a request began with among them."""
        ...

    @property
    def weight_version(self) -> str:
        """The name of the weights that all of its tokens come from; known once one has come."""
        ...

    def take(self) -> Awaitable[Sequence[TokenEntry]]:
        """Waits for new entries and returns all of them; () at the end.

        It gives each output index of each choice exactly once and in order, and ends after every choice
        finished or was cancelled. Raises EyasError if the request fails or its deadline passes, and if its
        reader is so slow that the stream's bounded buffer is full.
        """
        ...

    def use_lanes(self, lanes: Lanes | None) -> None:
        """Offers an entry that comes while the reader waits to its choice's lane from now on (None: to none).

        Lanes leave a request's first two tokens to `take`, which alone gives the end and errors. A stream
        may do without lanes.
        """

    async def cancel(self, choice: int | None = None) -> None:
        """Ends one choice, or (None) the whole request, at any stage. Idempotent."""
        ...

    def fail(self, error: EyasError) -> None:
        """Ends the stream with `error` after the entries that it holds already."""
        ...

    async def aclose(self) -> None:
        """Cancels what still runs and frees everything. Idempotent."""
        ...


class WatchedStream(GenerationStream):
    """A stream that calls `on_close` when it is closed, once."""

    def __init__(self, stream: GenerationStream, on_close: Callable[[WatchedStream], None]) -> None:
        self._stream = stream
        self._on_close: Callable[[WatchedStream], None] | None = on_close

    @property
    def tokens(self) -> int:
        return self._stream.tokens

    @property
    def weight_version(self) -> str:
        return self._stream.weight_version

    def take(self) -> Awaitable[Sequence[TokenEntry]]:
        return self._stream.take()

    def use_lanes(self, lanes: Lanes | None) -> None:
        self._stream.use_lanes(lanes)

    async def cancel(self, choice: int | None = None) -> None:
        await self._stream.cancel(choice)

    def fail(self, error: EyasError) -> None:
        self._stream.fail(error)

    async def aclose(self) -> None:
        if self._on_close is not None:
            self._on_close(self)
            self._on_close = None
        await self._stream.aclose()


class AdapterControl(Protocol):
    """The adapters of the served model. `roster`: those that requests may have, as last heard of."""

    roster: AdapterRoster

    async def look(self) -> None:
        """Makes `roster` that of now: another gateway may have changed it."""
        ...

    async def load(self, adapter: Adapter, *, replace: bool) -> Adapter:
        """Loads an adapter on all workers, or on none, and returns it with its id and rank.

        `replace`: one of its name may be loaded, and leaves. Raises InvalidRequest for a name that is taken
        otherwise, what a worker says is wrong with the folder, and Unavailable where none serves.
        """
        ...

    async def unload(self, name: str, id: str = "") -> Adapter:
        """Unloads an adapter on all workers: its requests go on to their ends, and no new one is taken.

        `id`: what it must have; "": any. Raises ModelNotFound for a name that none has, InvalidRequest for
        another id.
        """
        ...


class WeightControl(Protocol):
    """The weights of the served model. `newest`: those that answer requests, as last heard of."""

    newest: WeightsInfo

    async def update(self, update: WeightUpdate) -> WeightsChange:
        """Changes the weights of all workers, or of none.

        Raises what a worker says is wrong with them, Busy if what runs has not ended in time, or while
        another update is under way, and Unavailable if a worker is lost: then the old weights serve on.
        """
        ...

    async def read(self, name: str, count: int) -> tuple[float, ...]:
        """The first numbers of a tensor, as it was stored. Raises NotFound for one that is not there."""
        ...

    async def join(self, command: JoinGroup) -> tuple[str, ...]:
        """Has every worker join a `torch.distributed` group; their addresses, in the order of their ranks.

        Raises what keeps one from it.
        """
        ...

    async def leave(self, group: str) -> None:
        """Has every worker leave it."""
        ...


class GenerationBackend(Protocol):
    """Turns requests into tokens: the cluster, or a script in a test."""

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        """Raises what is known to refuse these if all are started together."""
        ...

    async def start(self, request: GenerationRequest) -> GenerationStream:
        """Returns once every worker involved has admitted the request.

        Raises EyasError (Overloaded, Unavailable, ...) if one refuses it; then, and when this call is
        cancelled, no worker keeps any of it.
        """
        ...

    async def models(self) -> list[WorkerInfo]:
        """The workers known now and those expected back, from the last snapshot: it never waits."""
        ...

    def links(self) -> list[RouterCandidate]:
        """The workers known now, each with this gateway's requests and connection to it."""
        ...

    def health(self) -> BackendHealth:
        """Whether a request sent now would succeed, as far as is known already: it never waits."""
        ...

    async def flush(self, wait_s: float) -> dict[str, int]:
        """Empties the prefix cache of each worker on which nothing runs; the pages that each had.

        Raises Busy if something still runs on one after `wait_s`, and what else keeps one from it.
        """
        ...

    async def control(self, command: ControlCommand) -> dict[str, ControlOutcome]:
        """Has every worker carry the command out; what each did. Raises what keeps one of them from it."""
        ...

    @property
    def adapters(self) -> AdapterControl:
        """The adapters that requests may have, and how they come and go."""
        ...

    @property
    def weights(self) -> WeightControl:
        """The weights that answer, and how they change."""
        ...


class PassingBackend(GenerationBackend):
    """Passes everything to the backend behind it: what stands before a backend says only what it changes."""

    def __init__(self, backend: GenerationBackend) -> None:
        self._backend = backend

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        self._backend.check(requests)

    async def start(self, request: GenerationRequest) -> GenerationStream:
        return await self._backend.start(request)

    async def models(self) -> list[WorkerInfo]:
        return await self._backend.models()

    def links(self) -> list[RouterCandidate]:
        return self._backend.links()

    def health(self) -> BackendHealth:
        return self._backend.health()

    async def flush(self, wait_s: float) -> dict[str, int]:
        return await self._backend.flush(wait_s)

    async def control(self, command: ControlCommand) -> dict[str, ControlOutcome]:
        return await self._backend.control(command)

    @property
    def adapters(self) -> AdapterControl:
        return self._backend.adapters

    @property
    def weights(self) -> WeightControl:
        return self._backend.weights
