"""Drains a gateway: its backend refuses new requests, lets open ones finish, and at last ends them.

It stands between the fronts and the backend that they share, so that HTTP and gRPC drain alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from eyas.common.errors import Unavailable
from eyas.common.types import GenerationRequest
from gateway.backends.base import (
    BackendHealth,
    GenerationBackend,
    GenerationStream,
    PassingBackend,
    WatchedStream,
)

DRAINING = "the server is draining: it is about to stop"


class DrainableBackend(PassingBackend):
    """Passes everything to the backend behind it until `close`; then it refuses requests and is unhealthy."""

    def __init__(self, backend: GenerationBackend) -> None:
        super().__init__(backend)
        self._closed = False
        self._starting: set[asyncio.Timeout] = set()
        self._open: set[WatchedStream] = set()
        self._on_empty: Callable[[], None] = lambda: None

    @property
    def requests(self) -> int:
        """How many requests are open."""
        return len(self._starting) + len(self._open)

    def close(self, on_empty: Callable[[], None]) -> None:
        """Refuses requests from now on. Calls `on_empty` as soon as none is open, perhaps at once."""
        self._closed, self._on_empty = True, on_empty
        self._check_empty()

    def cut(self) -> None:
        """Ends all open requests now, with Unavailable."""
        now = asyncio.get_running_loop().time()
        for start in self._starting:
            start.reschedule(now)
        for stream in self._open:
            stream.fail(Unavailable(DRAINING))

    # --- the backend -----------------------------------------------------------------------------------

    async def start(self, request: GenerationRequest) -> GenerationStream:
        if self._closed:
            raise Unavailable(DRAINING)
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._starting.add(limit)
                stream = WatchedStream(await self._backend.start(request), self._ended)
                self._open.add(stream)
        except TimeoutError:
            if limit.expired():
                raise Unavailable(DRAINING) from None
            raise
        finally:
            self._starting.discard(limit)
            self._check_empty()
        return stream

    def health(self) -> BackendHealth:
        return BackendHealth(DRAINING) if self._closed else self._backend.health()

    def _ended(self, stream: WatchedStream) -> None:
        self._open.discard(stream)
        self._check_empty()

    def _check_empty(self) -> None:
        if self._closed and not self.requests:
            self._on_empty()
