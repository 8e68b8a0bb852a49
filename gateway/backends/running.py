"""The time that calls may take: until a deadline, an abort by their caller, or a silence of the workers.

The calls that run are known by ids, so that a caller can end one. Of a gateway of several processes each has
its own calls, and each asks the others to end theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import msgspec

from eyas.common.errors import Cancelled, DeadlineExceeded
from gateway.http.siblings import GatewaySiblings

ABORT = "abort"
ABORT_S = 5.0  # a process that takes longer ends its calls all the same, and they are not counted
SILENCE_S = 1800.0  # seconds without a token, in a queue or between two, after which a request ends


class CallLifetime:
    """The time that a call has: until its deadline (by the event loop's clock), or until it is aborted."""

    def __init__(self, deadline: float, caller: str = "", ids: Iterable[str] = ()) -> None:
        self.deadline = deadline
        self.caller = caller
        self.ids = frozenset(ids)
        self._scopes: list[asyncio.Timeout] = []
        self._aborted = False

    def abort(self) -> None:
        """Ends what runs within `limit`, and what would."""
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
    """All of them. A caller reaches its own calls alone. `siblings`: the gateway's other processes."""

    def __init__(self, siblings: GatewaySiblings | None = None) -> None:
        self._calls: set[CallLifetime] = set()
        self._siblings = siblings
        if siblings is not None:
            siblings.on(ABORT, self._answer_abort)

    @contextlib.contextmanager
    def one(self, call: CallLifetime) -> Iterator[None]:
        """Registers a call while it runs."""
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)

    async def abort(self, caller: str, id: str | None) -> int:
        """Aborts the caller's calls that are known by `id` (None: all of its calls) in every process of this
        gateway; returns how many, without those of a process that does not answer in time.
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
    """Watches a count of tokens; where it has not grown for `SILENCE_S`, `limit` expires at once.

    It looks every `SILENCE_S`, so a silence between two tokens may last twice as long: work per look, none
    per token. The wait for the first token is exact.
    """

    def __init__(self, limit: asyncio.Timeout, tokens: Callable[[], int]) -> None:
        self.expired = False
        self._limit = limit
        self._tokens = tokens
        self._seen = tokens()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(SILENCE_S, self._look)

    def stop(self) -> None:
        """Ends the watch. Idempotent."""
        self._timer.cancel()

    def _look(self) -> None:
        seen, self._seen = self._seen, self._tokens()
        if self._seen == seen:
            self.expired = True
            self._limit.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_later(SILENCE_S, self._look)
