"""Calls of a library that may never return: each on a thread, which is left to it after a while."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

Result = TypeVar("Result")

_Calls: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]"


class BoundedCalls:
    """Daemon threads, which are used again as long as their calls return in time. Any thread may call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[_Calls] = []  # of threads that wait for one

    def __call__(self, within_s: float, call: Callable[..., Result], *args: Any) -> Result:
        """The result of a call. Raises what that raises, or TimeoutError: then it goes on, and nobody
        hears of it.
        """
        try:
            thread = self._idle.pop()
        except IndexError:
            thread = self._new()
        result: Future[Result] = Future()
        thread.put((result, call, args))
        try:
            return result.result(within_s)
        finally:
            if result.done():
                self._idle.append(thread)
            else:
                thread.put(None)

    def close(self) -> None:
        """Ends the threads that wait."""
        while self._idle:
            self._idle.pop().put(None)

    def _new(self) -> _Calls:
        calls: _Calls = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(calls,), name=self._name, daemon=True).start()
        return calls


def _serve(calls: _Calls) -> None:
    while (one := calls.get()) is not None:
        result, call, args = one
        try:
            result.set_result(call(*args))
        except Exception as error:
            result.set_exception(error)
        del one, result, call, args  # with the memory that they hold
