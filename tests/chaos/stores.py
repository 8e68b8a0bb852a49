"""A shared store that is killed, and stopped, while a cluster uses it: its time may be lost, no answer."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.faults import Kind
from tests.rpc.redis_server import RedisServer

PAUSE_S, AWAY_S = (5.0, 20.0), (2.0, 15.0)  # between two faults, and of one
TIERS = ("--host-cache-gb", "0.05", "--disk-cache-gb", "0.1")  # less than the prompts take: pages go on


@dataclass
class TormentedStore:
    """A Redis of its own. `told` hears of each fault, `faults` counts them."""

    seed: int
    told: Callable[[str], None]
    server: RedisServer = field(default_factory=RedisServer)
    faults: Counter[str] = field(default_factory=Counter)

    def flags(self, folder: Path) -> Sequence[str]:
        """Of `eyas serve`: every tier, the store last."""
        return (*TIERS, "--disk-cache-dir", str(folder), "--kv-store", self.server.url)

    @contextlib.asynccontextmanager
    async def tormented(self) -> AsyncIterator[None]:
        """It serves at the beginning, and then most of the time."""
        await self.server.start()
        torment = asyncio.create_task(self._torment())
        try:
            yield
        finally:
            torment.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await torment
            self.server.kill()
            await self.server.client.aclose()

    async def _torment(self) -> None:
        rng = random.Random(f"store/{self.seed}")
        while True:
            await asyncio.sleep(rng.uniform(*PAUSE_S))
            kind = rng.choice((Kind.KILL, Kind.STOP))
            self.faults[kind] += 1
            self.told(f"{kind} the store")
            if kind is Kind.KILL:
                self.server.kill()
            else:
                self.server.signal(signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(*AWAY_S))
            if kind is Kind.KILL:
                await self.server.start()
            else:
                self.server.signal(signal.SIGCONT)
