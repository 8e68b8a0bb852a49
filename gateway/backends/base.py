"""The interface between the gateway's fronts (HTTP, gRPC) and the backend that generates tokens."""

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

    Each field is a sentence, or empty. `problem`: why the request would fail. `degraded`: how its answer
    would be limited. `paused`: why it would have to wait.
    """

    problem: str = ""
    degraded: str = ""
    paused: str = ""


class FastPath(Protocol):
    """Takes token entries past the buffer and the task of their reader."""

    __slots__ = ()

    def offer(self, entry: TokenEntry, now: float) -> bool:
        """Consumes an entry that arrived at `now` (monotonic seconds). False if the entry was not taken."""
        ...


Lanes = Callable[[int], FastPath | None]
"""Maps the index of a choice to its lane; None if it has none yet."""


class GenerationStream(Protocol):
    """The token stream of one admitted request. Its reader owns it and calls `aclose`, however it ended."""

    @property
    def tokens(self) -> int:
        """The number of tokens so far, including those that the request began with."""
        ...

    @property
    def weight_version(self) -> str:
        """The name of the weights that generate all of its tokens; final once there is a token."""
        ...

    def take(self) -> Awaitable[Sequence[TokenEntry]]:
        """Waits for new entries and returns them; () at the end.

        Each output index of each choice is returned exactly once and in order. The stream ends when every
        choice has finished or was cancelled. Raises EyasError if the request fails or its deadline passes,
        and if the bounded buffer is full because the reader is too slow.
        """
        ...

    def use_lanes(self, lanes: Lanes | None) -> None:
        """From now on, offers entries that arrive while the reader waits to the lane of their choice.

        `lanes` None: to none. The first two tokens of a request, its end and its errors come from `take`
        alone. A stream need not support lanes.
        """

    async def cancel(self, choice: int | None = None) -> None:
        """Ends one choice, or the whole request if `choice` is None, at any stage. Idempotent."""
        ...

    def fail(self, error: EyasError) -> None:
        """Ends the stream with `error` after the buffered entries."""
        ...

    async def aclose(self) -> None:
        """Cancels unfinished choices and frees all resources. Idempotent."""
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
    """Loads and unloads adapters. `roster`: the adapters that requests may use, as last reported."""

    roster: AdapterRoster

    async def look(self) -> None:
        """Updates `roster` from the workers: another gateway may have changed it."""
        ...

    async def load(self, adapter: Adapter, *, replace: bool) -> Adapter:
        """Loads an adapter on all workers, or on none, and returns it with its id and rank.

        `replace`: unloads an adapter of the same name, for which InvalidRequest is raised otherwise. Raises
        the error of a worker that cannot load the folder, and Unavailable if no worker serves.
        """
        ...

    async def unload(self, name: str, id: str = "") -> Adapter:
        """Unloads an adapter on all workers. Its running requests finish; new ones are refused.

        `id`: the id that the adapter must have; "": any. Raises ModelNotFound for an unknown name and
        InvalidRequest for another id.
        """
        ...


class WeightControl(Protocol):
    """Updates the weights of the served model. `newest`: those that answer requests, as last reported."""

    newest: WeightsInfo

    async def update(self, update: WeightUpdate) -> WeightsChange:
        """Changes the weights of all workers, or of none.

        Raises the error of a worker that cannot load them, Busy if running requests have not ended in time or
        another update is in progress, and Unavailable if a worker is lost. After an error the old weights
        continue to serve.
        """
        ...

    async def read(self, name: str, count: int) -> tuple[float, ...]:
        """The first `count` numbers of the stored tensor `name`. Raises NotFound if there is none."""
        ...

    async def join(self, command: JoinGroup) -> tuple[str, ...]:
        """Has every worker join a `torch.distributed` group; returns their addresses in the order of ranks.

        Raises the error of a worker that cannot join.
        """
        ...

    async def leave(self, group: str) -> None:
        """Has every worker leave the group."""
        ...


class GenerationBackend(Protocol):
    """Generates tokens for requests: the cluster, or a script in a test."""

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        """Raises the error by which these requests would be refused if all were started together."""
        ...

    async def start(self, request: GenerationRequest) -> GenerationStream:
        """Returns once every worker involved has admitted the request.

        Raises EyasError (Overloaded, Unavailable, ...) if one refuses it. After an error or a cancel of this
        call nothing of the request stays on any worker.
        """
        ...

    async def models(self) -> list[WorkerInfo]:
        """The known workers and those expected back, from the last snapshot. Never waits."""
        ...

    def links(self) -> list[RouterCandidate]:
        """The known workers, each with this gateway's requests and connection to it."""
        ...

    def health(self) -> BackendHealth:
        """Whether a request sent now would succeed, from the last snapshot. Never waits."""
        ...

    async def flush(self, wait_s: float) -> dict[str, int]:
        """Empties the prefix cache of every worker; returns the number of pages that each had.

        Raises Busy if a request still runs on one after `wait_s`, and the error of a worker that fails.
        """
        ...

    async def control(self, command: ControlCommand) -> dict[str, ControlOutcome]:
        """Has every worker carry out the command; returns the outcomes. Raises the error of one that
        fails.
        """
        ...

    @property
    def adapters(self) -> AdapterControl:
        """The adapters that requests may use."""
        ...

    @property
    def weights(self) -> WeightControl:
        """The weights that answer requests."""
        ...


class PassingBackend(GenerationBackend):
    """Delegates every method to another backend; subclasses override the ones that they change."""

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
