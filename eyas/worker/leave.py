"""How long a process that was asked to leave may go on: what signals mean to a worker, a gateway, a cluster.

SIGTERM or SIGINT asks: what runs may end, within the process's drain time. A second one, or SIGHUP (the
terminal or the supervisor is gone), means now. It knows signals and clocks; how to leave is its owner's.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal


class Leave:
    """`asked` and `now` are set as signals come. Made on the event loop of the main thread."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._ask)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(signal.SIGHUP, self._hurry)

    async def within(self, seconds: float) -> None:
        """Until `seconds` have passed, or until `now`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.now.wait()

    def _ask(self) -> None:
        if self.asked.is_set():
            self.now.set()
        else:
            self.asked.set()

    def _hurry(self) -> None:
        self.asked.set()
        self.now.set()
