"""A worker as processes, with what it logs and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
from fake_engine import FakeWorker

from eyas.engine.ipc.messages import DraftDown

HERE = Path(__file__).parent
SCRIPT = """
import sys, fake_engine
from eyas.common.config import EngineConfig, WorkerConfig
from eyas.common.errors import EyasError
from eyas.common.types import Role
from eyas.worker import worker
from eyas.worker.worker import run_worker
worker.HANG_S = float(sys.argv[7])
roles = tuple(Role(name) for name in sys.argv[1].split(","))
try:
    engine = EngineConfig(roles=roles, model=sys.argv[2], pool_dir=sys.argv[3])
    config = WorkerConfig(engine=engine, registry=sys.argv[5], drain_s=float(sys.argv[6]))
    run_worker(config, getattr(fake_engine, sys.argv[4]))
except EyasError as error:
    sys.exit(f"eyas: {type(error).__name__}: {error}")
"""


class Process:
    """One `run_worker` in its own session, so that a test may signal its whole group."""

    def __init__(
        self,
        roles: str,
        pools: Path,
        engine: str = "main",
        model: str = "m",
        member: str = "127.0.0.1:1",
        limits: tuple[str, str] = ("30", "60"),
    ) -> None:
        """`limits`: its `drain_s`, and HANG_S."""
        env = {**os.environ, "PYTHONPATH": f"{HERE.parent.parent}:{HERE}"}
        words = (roles, model, str(pools), engine, f"static:{member}", *limits)
        self.popen = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *words],
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            env=env,
        )
        self.address = self.metrics_port = ""

    async def ready(self) -> Process:
        assert self.popen.stderr
        line = ""
        async with asyncio.timeout(30):
            while not line.startswith("worker ready: roles="):
                line = await asyncio.to_thread(self.popen.stderr.readline)
                assert line, "it ended"
        self.address = line.split("address=")[1].split()[0]
        self.metrics_port = line.split("metrics-port=")[1].split()[0]
        return self

    @property
    def engine(self) -> psutil.Process:
        children = psutil.Process(self.popen.pid).children()
        (engine,) = [c for c in children if "spawn_main" in " ".join(c.cmdline())]
        return engine

    async def ended(self) -> tuple[int, str]:
        """(return code, what was left on standard error), within 10 s."""
        _, said = await asyncio.to_thread(self.popen.communicate, None, 10)
        return self.popen.returncode, said


@contextlib.asynccontextmanager
async def process(roles: str, pools: Path, **kind: Any) -> AsyncIterator[Process]:
    started = Process(roles, pools, **kind)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.popen.pid, signal.SIGKILL)
        started.popen.communicate()


async def gone(process: psutil.Process, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.02)


async def fallen(decode: FakeWorker) -> float:
    async with asyncio.timeout(30):
        while not any(closed.seq == 0 for down in decode.engine.of(DraftDown) for closed in down.closed):
            await asyncio.sleep(0.02)
    return time.monotonic()
