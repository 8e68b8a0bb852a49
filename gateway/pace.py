"""Large prompts, one after another: between two of them the event loop turns for everyone else.

To read a prompt of 60,000 ids and to send it takes the loop some milliseconds each. A hundred of them in a
row leave nothing for streams: gRPC hands the loop one message of a worker's session per turn. So a large
piece of work waits until the loop has had time for others since the piece before. It knows sizes and
callers. It refuses to know what a piece does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from eyas.common.errors import DeadlineExceeded, Overloaded
from eyas.common.types import GenerationRequest, WorkerInfo
from gateway.backend import BackendHealth, GenerationBackend, GenerationStream
from gateway.line import Line
from gateway.router import Candidate

LARGE_BYTES = 32 << 10  # of a piece: about a millisecond of work. Smaller ones never wait
ID_BYTES = 6  # of a token id, as bodies write them
MAX_WAITING_BYTES = 64 << 20  # of prompts that nothing was done for yet: some seconds of work
WAIT_S = 10.0  # that they wait
REST = 0.5  # of a piece's time, which the loop has for others after it
LEAST_REST_S = 0.001  # so that it asks its sockets at least once


class Pace:
    """The turns of large pieces of work on this event loop. A piece is what its caller does, without a wait,
    after `enter` or `go_on` has returned.
    """

    def __init__(self, weight: Callable[[str], float] = lambda caller: 1.0) -> None:
        """`weight`: a caller's part, beside others that wait."""
        self._line: Line[asyncio.Future[None]] = Line(MAX_WAITING_BYTES, weight)
        self._began = 0.0  # the newest piece
        self._resting: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> tuple[int, int]:
        """(pieces that wait for their turn, their bytes)."""
        return len(self._line), self._line.waiting

    async def enter(self, caller: str, size: int) -> None:
        """The turn of work that begins, on this many bytes.

        Raises Overloaded if too much waits, or it waited for `WAIT_S`.
        """
        if not self._must_wait(size):
            return
        turn = asyncio.get_running_loop().create_future()
        said = "too many large prompts wait to be read: send it again later"
        for refused in self._line.add_new(turn, caller, size):
            if not refused.done():
                refused.set_exception(Overloaded(said))
        try:
            await self._wait(turn, WAIT_S)
        except TimeoutError:
            raise Overloaded(said) from None

    async def go_on(self, caller: str, size: int, within_s: float) -> None:
        """The turn of more work on what has entered. Raises DeadlineExceeded if it takes longer to come."""
        if not self._must_wait(size):
            return
        turn = asyncio.get_running_loop().create_future()
        self._line.add_begun(turn, caller, size)
        try:
            await self._wait(turn, within_s)
        except TimeoutError:
            raise DeadlineExceeded(f"the request waited {within_s:g} s to be sent to a worker") from None

    def _must_wait(self, size: int) -> bool:
        if size < LARGE_BYTES:
            return False
        if self._resting is not None:
            return True
        self._began = time.monotonic()
        self._resting = asyncio.create_task(self._rest(), name="pace")
        return False

    async def _wait(self, turn: asyncio.Future[None], within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await turn
        finally:
            self._line.remove(turn)

    async def _rest(self) -> None:
        """After each piece, until none waits: lets the loop turn, then says whose turn it is."""
        while True:
            await asyncio.sleep(0)  # the piece works
            await asyncio.sleep(max(REST * (time.monotonic() - self._began), LEAST_REST_S))
            if not self._line:
                self._resting = None
                return
            self._began = time.monotonic()
            if not (turn := self._line.next()).done():  # its caller may be leaving
                turn.set_result(None)


class PacedBackend(GenerationBackend):
    """Sends large prompts to the backend behind it one after another."""

    def __init__(self, backend: GenerationBackend, pace: Pace) -> None:
        self._backend = backend
        self._pace = pace

    async def start(self, request: GenerationRequest) -> GenerationStream:
        size = ID_BYTES * len(request.prompt_ids)
        if size >= LARGE_BYTES:
            began = time.monotonic()
            await self._pace.go_on(request.caller, size, request.timeout_s)
            left = max(request.timeout_s - (time.monotonic() - began), 0.001)
            request = msgspec.structs.replace(request, timeout_s=left)
        return await self._backend.start(request)

    async def models(self) -> list[WorkerInfo]:
        return await self._backend.models()

    def links(self) -> list[Candidate]:
        return self._backend.links()

    def health(self) -> BackendHealth:
        return self._backend.health()
