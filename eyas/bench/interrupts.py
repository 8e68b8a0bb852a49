"""A Ctrl-C that cancels a measurement between two callbacks of its loop.

Python's own handler runs in the middle of whatever the program does, and a cancellation from there may get
lost.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` on a loop of its own and returns its result. The first Ctrl-C cancels it, a second one ends
    the process.

    Raises KeyboardInterrupt if it does not bear being cancelled. Where Ctrl-C is ignored it stays so.
    """

    async def guarded() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def once() -> None:
            loop.remove_signal_handler(signal.SIGINT)
            task.cancel()

        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGINT, once)
        try:
            return await main
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    try:
        return uvloop.run(guarded())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
