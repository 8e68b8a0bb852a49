"""Keeps a supervised process running: starts it again whenever it dies, after longer and longer pauses."""

from __future__ import annotations

import asyncio
import time

from eyas.cluster.child import ChildProcess, LogLine

BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # before the first, second, ... restart, and all later ones
STEADY_S = 60.0  # after a run of this length, earlier deaths no longer count


async def keep(child: ChildProcess, log: LogLine) -> None:
    """Watches a started process until cancelled."""
    deaths = 0
    while True:
        code = await child.exited()
        deaths = 1 if time.monotonic() - child.started_at > STEADY_S else deaths + 1
        pause = BACKOFF_S[min(deaths, len(BACKOFF_S)) - 1]
        log(child.name, f"ended with code {code}; starting it again in {pause:g} s")
        child.kill()  # the rest of its group would keep its port and its pool
        await asyncio.sleep(pause)
        await _start(child, log)


async def _start(child: ChildProcess, log: LogLine) -> None:
    """Tries until it succeeds: memory may be short for a moment, or the program is just being replaced."""
    while True:
        try:
            child.start()
            return
        except OSError as error:
            pause = BACKOFF_S[-1]
            log(child.name, f"cannot be started ({error.strerror}); trying again in {pause:g} s")
        await asyncio.sleep(pause)
