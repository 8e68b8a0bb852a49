"""Gives up an engine that has work, makes no progress, and is held by nothing.

A front tells soon that its engine is late, and requests wait for it. One that hangs for good must end: only a
process that has ended is started again. `liveness` says what progress is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from eyas.common.errors import Unavailable

HANG_S = 60.0  # of looks in a row that find the engine stalled
LOOK_S = 0.5


async def hung(stalls: Callable[[], bool], pid: int) -> NoReturn:
    """Waits until the engine, of process `pid`, has stalled for HANG_S; then raises Unavailable.

    Looks are counted and not the clock: a machine that slept has no engine that hangs.
    """
    looks = 0
    while looks * LOOK_S < HANG_S:
        await asyncio.sleep(LOOK_S)
        looks = looks + 1 if stalls() and not is_held(pid) else 0
    raise Unavailable(f"the engine hangs: it has work, and made no progress for {HANG_S:.0f} s")


def is_held(pid: int) -> bool:
    """Whether a signal has stopped the process, or a debugger traces it; False where nothing tells."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    told = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return told.get("State", "")[:1] in ("T", "t") or told.get("TracerPid", "0") != "0"
