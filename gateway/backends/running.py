"""Limits the time of calls: by a deadline, an abort by their caller, or workers that send no token.

Running calls are registered by their ids, so that a caller can abort one. In a gateway of several processes
each process has its own calls, and forwards an abort to the other processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import msgspec

from eyas.common.errors import Cancelled, DeadlineExceeded
from gateway.http.siblings import GatewaySiblings

ABORT = "abort"
ABORT_S = 5.0  # a process that takes longer still aborts its calls, but they are not counted
SILENCE_S = 1800.0  # seconds without a token, in a queue or between two, after which a request ends


class CallLifetime:
    """Bounds a call by its deadline (on the event loop's clock) and by an abort."""

    def __init__(self, deadline: float, caller: str = "", ids: Iterable[str] = ()) -> None:
        self.deadline = deadline
        self.caller = caller
        self.ids = frozenset(ids)
        self._scopes: list[asyncio.Timeout] = []
        self._aborted = False

    def abort(self) -> None:
        """Ends the work that runs within `limit` now, or enters it later."""
        self._aborted = True
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Limits a part of the call's work. Raises DeadlineExceeded at its deadline, Cancelled if aborted."""
        try:
            async with asyncio.timeout_at(0.0 if self._aborted else self.deadline) as scope:
                self._scopes.append(scope)
                try:
                    yield
                finally:
                    self._scopes.remove(scope)
        except TimeoutError as error:
            if self._aborted:
                raise Cancelled("the request was aborted (/abort_request)") from error
            raise DeadlineExceeded("the request took longer than its timeout") from error


class RunningCalls:
    """The running calls of this process. A caller can abort only its own. `siblings`: the gateway's other
    processes.
    """

    def __init__(self, siblings: GatewaySiblings | None = None) -> None:
        self._calls: set[CallLifetime] = set()
        self._siblings = siblings
        if siblings is not None:
            siblings.on(ABORT, self._answer_abort)

    @contextlib.contextmanager
    def registered(self, call: CallLifetime) -> Iterator[None]:
        """Registers a call while it runs."""
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)

    async def abort(self, caller: str, id: str | None) -> int:
        """Aborts the caller's calls with this `id` (None: all of its calls) in every process of this gateway.

        Returns their number, without those of a process that does not answer in time.
        """
        count = self._abort(caller, id)
        if self._siblings is not None:
            replies = await self._siblings.ask(ABORT, msgspec.json.encode((caller, id)), ABORT_S)
            count += sum(int(ended) for ended in replies.values() if ended)
        return count

    def _answer_abort(self, about: bytes) -> bytes:
        """Aborts calls for another process."""
        return str(self._abort(*msgspec.json.decode(about, type=tuple[str, str | None]))).encode()

    def _abort(self, caller: str, id: str | None) -> int:
        calls = [call for call in self._calls if call.caller == caller and (id is None or id in call.ids)]
        for call in calls:
            call.abort()
        return len(calls)


class SilenceLimit:
    """Lets `limit` expire when the number of tokens has not grown for `SILENCE_S`.

    The number is polled every `SILENCE_S`, so that a token costs no work. A silence between two tokens may
    therefore last twice as long; the wait for the first token is exact.
    """

    def __init__(self, limit: asyncio.Timeout, tokens: Callable[[], int]) -> None:
        self.expired = False
        self._limit = limit
        self._tokens = tokens
        self._seen = tokens()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(SILENCE_S, self._poll)

    def stop(self) -> None:
        """Ends the watch. Idempotent."""
        self._timer.cancel()

    def _poll(self) -> None:
        seen, self._seen = self._seen, self._tokens()
        if self._seen == seen:
            self.expired = True
            self._limit.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_later(SILENCE_S, self._poll)
