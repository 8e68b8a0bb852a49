"""Signals of a worker and a gateway: leave after draining, or leave now.

SIGTERM or SIGINT asks the process to leave: open requests may end, within its drain time. A second one, or
SIGHUP (the terminal or the supervisor is gone), means now. But systemd tells every process of a service, and
a supervisor among them tells its children once more: a SIGTERM so soon after the first word is the same word.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time

SAME_WORD_S = 1.0  # a busy supervisor passes a signal on within this time


class StopSignals:
    """Signals set `requested` and `now`. Construct it on the event loop of the main thread."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.now = asyncio.Event()
        self._requested_at = 0.0
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._ask)
        loop.add_signal_handler(signal.SIGTERM, self._ask_once)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(signal.SIGHUP, self._hurry)

    async def within(self, seconds: float) -> None:
        """Waits until `seconds` have passed, or until `now`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.now.wait()

    def _ask(self) -> None:
        if self.requested.is_set():
            self.now.set()
        else:
            self.requested.set()
            self._requested_at = time.monotonic()

    def _ask_once(self) -> None:
        if not self.requested.is_set() or time.monotonic() - self._requested_at > SAME_WORD_S:
            self._ask()

    def _hurry(self) -> None:
        self.requested.set()
        self.now.set()
