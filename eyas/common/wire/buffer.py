"""The bounded buffer of one outgoing stream: a dispatcher fills it without waiting, the stream empties it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from eyas.common.errors import DeadlineExceeded, Overloaded

T = TypeVar("T")


class StreamBuffer(Generic[T]):
    """Holds at most `limit` items. One more ends the stream with Overloaded: a slow reader harms only itself.

    For use within one event loop. `deadline` (loop time, seconds) ends the stream with DeadlineExceeded.
    """

    def __init__(self, limit: int, deadline: float | None = None) -> None:
        self._limit = limit
        self._deadline = deadline
        self._items: deque[T] = deque()
        self._error: Exception | None = None
        self._filled = asyncio.Event()

    def put(self, item: T) -> None:
        """Adds an item. Ends the stream if it is full; does nothing after the end."""
        if self._error is not None:
            return
        if len(self._items) >= self._limit:
            self._items.clear()
            self.end(Overloaded(f"the stream's reader is {self._limit} messages behind"))
            return
        self._items.append(item)
        self._filled.set()

    def end(self, error: Exception) -> None:
        """Ends the stream: `get` gives what is buffered, then raises the first `error`."""
        self._error = self._error or error
        self._filled.set()

    async def get(self) -> T:
        """The next item, once there is one. Raises the error that ended the stream, or DeadlineExceeded."""
        try:
            async with asyncio.timeout_at(self._deadline):
                while not self._items:
                    if self._error is not None:
                        raise self._error
                    self._filled.clear()
                    await self._filled.wait()
        except TimeoutError:
            raise DeadlineExceeded("the request's time is over") from None
        return self._items.popleft()
