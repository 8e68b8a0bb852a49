"""The calls that run on this gateway, by the ids that they are known by, so that a caller can end one.

It knows ids, callers and deadlines. It refuses to know what a call does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator

from eyas.common.errors import Cancelled, DeadlineExceeded


class Lifetime:
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
        """Around a part of the call's work. Raises DeadlineExceeded at its deadline, Cancelled if aborted."""
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
    """All of them. A caller reaches its own calls alone."""

    def __init__(self) -> None:
        self._calls: set[Lifetime] = set()

    @contextlib.contextmanager
    def one(self, call: Lifetime) -> Iterator[None]:
        """Around a call."""
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)

    def abort(self, caller: str, id: str | None) -> int:
        """Aborts the caller's calls that are known by `id` (None: all of its calls); returns how many."""
        found = [call for call in self._calls if call.caller == caller and (id is None or id in call.ids)]
        for call in found:
            call.abort()
        return len(found)
