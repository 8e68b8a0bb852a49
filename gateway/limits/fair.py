"""Shares a full cluster between callers: one with fewer requests than another waits, the others get a 429.

Workers bound their queues, which one flooding caller would fill: this backend reserves the places that become
free for callers with fewer requests. With one caller, or without API keys, it has no effect.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from eyas.common.errors import DeadlineExceeded, Overloaded
from eyas.common.types import GenerationRequest
from gateway.backends.base import GenerationBackend, GenerationStream, PassingBackend, WatchedStream
from gateway.backends.running import SILENCE_S
from gateway.limits.queues import FairQueue, QueueClaim

LOOK_S = 0.1  # a place may also be freed by requests of another gateway


class FairBackend(PassingBackend):
    """Delegates requests to another backend; if that is full, callers share it by `weight`."""

    def __init__(
        self, backend: GenerationBackend, weight: Callable[[str], float] = lambda caller: 1.0
    ) -> None:
        super().__init__(backend)
        self._weight = weight
        self._open_requests: dict[str, int] = {}  # by caller: requests that are open, or wait here
        self._turns: FairQueue[_QueuedRequest] = FairQueue()

    async def start(self, request: GenerationRequest) -> GenerationStream:
        caller = request.caller
        owed = self._is_owed(caller)
        self._open_requests[caller] = self._open_requests.get(caller, 0) + 1
        stream = None
        try:
            if not self._turns:
                with contextlib.suppress(Overloaded) if owed else contextlib.nullcontext():
                    stream = await self._backend.start(request)
            elif not owed:
                raise Overloaded("the server is full, and callers with fewer requests come first")
            if stream is None:
                stream = await self._wait(request)
        finally:
            if stream is None:
                self._leave(caller)
        return WatchedStream(stream, lambda _: self._leave(caller))

    # --- turns -----------------------------------------------------------------------------------------

    def _is_owed(self, caller: str) -> bool:
        """Whether another caller has more requests, for its weight, than this one would have."""
        own = (self._open_requests.get(caller, 0) + 1) / self._weight(caller)
        return any(
            count / self._weight(other) > own
            for other, count in self._open_requests.items()
            if other != caller
        )

    async def _wait(self, request: GenerationRequest) -> GenerationStream:
        """Starts the request when it is scheduled and a place is free. Raises DeadlineExceeded."""
        clock = asyncio.get_running_loop().time
        began, wait_s = clock(), min(request.timeout_s, SILENCE_S)
        tokens = len(request.prompt_ids) + len(request.choices) * request.params.max_tokens
        place = _QueuedRequest()
        self._turns.add(
            place, QueueClaim(request.caller, tokens, self._weight(request.caller), request.priority, clock())
        )
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    await place.may_try(is_first=self._turns.first() is place)
                    if self._turns.first() is not place:
                        continue
                    left = msgspec.structs.replace(
                        request, timeout_s=max(request.timeout_s - (clock() - began), 0.001)
                    )
                    with contextlib.suppress(Overloaded):
                        stream = await self._backend.start(left)
                        self._turns.serve(place)
                        return stream
        except TimeoutError:
            said = f"the request waited {wait_s:g} s for a place: the server is full"
            raise DeadlineExceeded(said) from None
        finally:
            self._turns.remove(place)
            self._look()

    def _leave(self, caller: str) -> None:
        """Counts the end of a request of this caller."""
        self._open_requests[caller] -= 1
        if not self._open_requests[caller]:
            del self._open_requests[caller]
        self._look()

    def _look(self) -> None:
        """Wakes the request that is scheduled next: a place may be free."""
        if self._turns:
            self._turns.first().free.set()


class _QueuedRequest:
    """A request that waits."""

    def __init__(self) -> None:
        self.free = asyncio.Event()

    async def may_try(self, *, is_first: bool) -> None:
        """Waits until a place may be free."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S if is_first else None):
                await self.free.wait()
        self.free.clear()
