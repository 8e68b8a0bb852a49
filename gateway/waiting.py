"""Logs why a gateway cannot serve yet: one line after some seconds, then more and more rarely.

It changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from eyas.common.cluster.discovery import WorkerRegistry
from gateway.backends.base import BackendHealth

LOOK_S = 0.5
FIRST_S = 5.0  # a cluster that starts may take this long
RAREST_S = 300.0

_log = logging.getLogger("eyas.gateway")


async def tell_waiting(health: Callable[[], BackendHealth], registry: WorkerRegistry) -> None:
    """Logs until it is cancelled."""
    clock = asyncio.get_running_loop().time
    pause_s, due = FIRST_S, clock() + FIRST_S
    while True:
        await asyncio.sleep(LOOK_S)
        reasons = [f"waiting for worker {worker}: {_end(why)}" for worker, why in registry.silent().items()]
        if problem := health().problem:
            reasons.insert(0, problem)
        if not reasons:
            pause_s, due = FIRST_S, clock() + FIRST_S
        elif clock() >= due:
            _log.warning("%s", "; ".join(reasons))
            pause_s = min(2 * pause_s, RAREST_S)
            due = clock() + pause_s


def _end(reason: str) -> str:
    """The last part of gRPC's message about a failed connection, which lists all attempts first."""
    return reason.rpartition(": ")[2]
