"""What signals mean to a worker and a gateway: leave after draining, or leave now.

SIGTERM or SIGINT asks the process to leave: open requests may end, within its drain time. A second one, or
SIGHUP (the terminal or the supervisor is gone), means now. This file knows signals and clocks; its owner
knows how to leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal


class Leave:
    """Signals set `asked` and `now`. Construct it on the event loop of the main thread."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._ask)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(signal.SIGHUP, self._hurry)

    async def within(self, seconds: float) -> None:
        """Waits until `seconds` have passed, or until `now`."""
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
