"""Bytes between two processes by gRPC: how fast, beside a plain copy; and owners that die or stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page_owner import GEOMETRY, content, handle, ready

from eyas.common.types import RankPages
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import ClosePull, Command, CopyPages, CopyStopped, OpenPull, PullMet, PullReady
from eyas.worker.kv_puller import KvPuller
from kv_transfer.area import Pages, PoolArea
from kv_transfer.backends.base import BackendSite, CopyJob
from kv_transfer.backends.shm import ShmBackend, map_file

POOL_DIR = "/dev/shm"
HERE = Path(__file__).parent
EVERY_PAGE = tuple(range(GEOMETRY.pages))


@dataclass
class Puller:
    """The pulls of a front without an engine: `heard` is what the engine would be told."""

    engine: EngineClient
    process: subprocess.Popen[str]
    pages: Pages  # the destination
    source: str
    heard: list[Command] = field(default_factory=list)

    async def told(self, kind: type) -> Any:
        async with asyncio.timeout(30):
            while not (found := [command for command in self.heard if isinstance(command, kind)]):
                await asyncio.sleep(0.002)
        self.heard.remove(found[0])
        return found[0]

    async def fetch(self) -> CopyStopped:
        self.engine.dispatch([CopyPages(1, 1, EVERY_PAGE, EVERY_PAGE)])
        return await self.told(CopyStopped)

    async def prove(self) -> CopyStopped:
        proof = (GEOMETRY.pages,)
        self.engine.dispatch([CopyPages(1, -1, proof, proof, proof=True)])
        return await self.told(CopyStopped)


async def anybody(worker: str) -> str:
    return worker


@contextlib.asynccontextmanager
async def pulling() -> AsyncIterator[Puller]:
    """A pull, met by grpc and watched, from a process that holds `content()`."""
    source, target = (f"{POOL_DIR}/eyas-test-{uuid.uuid4().hex}" for _ in range(2))
    Path(source).write_bytes(content().tobytes())
    Path(target).write_bytes(bytes([1]) * (GEOMETRY.pool_bytes + GEOMETRY.page_bytes))
    command = [sys.executable, str(HERE / "page_owner.py"), source]
    env = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout
        address = (await asyncio.to_thread(process.stdout.readline)).strip()
        heard: list[Command] = []

        def send(commands: Sequence[Command]) -> None:
            heard.extend(commands)

        engine = EngineClient(send)
        engine.ready = ready(target)
        pulls = KvPuller(engine, anybody)
        pages = map_file(target, GEOMETRY.page_bytes).pages
        puller = Puller(engine, process, pages, source, heard)
        engine.dispatch([OpenPull(1, handle(address), 1)])
        assert (await puller.told(PullMet)).pool == ready(source).pools["target"]
        await puller.told(PullReady)
        yield puller
        await pulls.close()
    finally:
        process.kill()
        process.communicate()
        for path in (source, target):
            os.unlink(path)


@pytest.mark.slow
async def test_sixty_four_mebibytes_beside_a_plain_copy(capsys: pytest.CaptureFixture[str]) -> None:
    """The ratios are printed, not judged: they depend on the machine's other work."""
    async with pulling() as puller:
        truth, speed = content(), {}
        for _ in range(3):
            stopped = await puller.fetch()
            assert stopped.failure is None and stopped.bytes == GEOMETRY.pool_bytes
            speed["grpc"] = max(speed.get("grpc", 0.0), stopped.bytes / stopped.seconds)
        assert (await puller.prove()).bytes == GEOMETRY.page_bytes
        assert np.array_equal(puller.pages, truth)
        plain, shared = np.ones_like(truth), np.ones_like(truth)
        backend = ShmBackend(BackendSite(PoolArea(shared), POOL_DIR, wire=None))  # type: ignore[arg-type]
        source = backend.open(ready(puller.source).pools["target"].ranks[0].exports["shm"])
        job = CopyJob(1, 1, RankPages(0, EVERY_PAGE), EVERY_PAGE)
        ways = ("shm", lambda: backend.copy(source, job)), ("memcpy", lambda: np.copyto(plain, truth))
        for name, copy in ways:
            for _ in range(3):
                began = time.monotonic()
                copy()
                speed[name] = max(speed.get(name, 0.0), truth.nbytes / (time.monotonic() - began))
        assert np.array_equal(shared[:-1], truth[:-1])
    with capsys.disabled():
        ratios = (
            f"{name} {rate / 1e9:.2f} GB/s = {rate / speed['memcpy']:.3f}" for name, rate in speed.items()
        )
        print("\n64 MiB, beside memcpy:", ", ".join(ratios))


async def test_a_closed_pull_ends_its_fetch_before_it_is_told() -> None:
    async with pulling() as puller:
        puller.engine.dispatch([CopyPages(1, 1, EVERY_PAGE, EVERY_PAGE)])
        async with asyncio.timeout(30):
            while (puller.pages[0] == 1).all():
                await asyncio.sleep(0)
        puller.engine.dispatch([ClosePull(1)])
        stopped = await puller.told(CopyStopped)
        assert stopped.failure.code == "cancelled" and stopped.bytes == 0
        written = puller.pages.copy()
        assert (written[-1] == 1).all(), "the whole fetch was over: nothing was cancelled"
        await asyncio.sleep(0.3)
        assert np.array_equal(puller.pages, written)
        assert (await puller.fetch()).failure.code == "transfer_failed"  # the Watch has ended


@pytest.mark.parametrize(
    ("number", "within_s"), [(signal.SIGKILL, 5.0), pytest.param(signal.SIGSTOP, 6.0, marks=pytest.mark.slow)]
)
async def test_an_owner_that_dies_or_stops_in_the_middle_ends_the_fetch(number: int, within_s: float) -> None:
    async with pulling() as puller:
        puller.process.send_signal(signal.SIGSTOP)
        puller.engine.dispatch([CopyPages(1, 1, EVERY_PAGE, EVERY_PAGE)])
        await asyncio.sleep(0.1)
        puller.process.send_signal(number)
        began = time.monotonic()
        stopped = await puller.told(CopyStopped)
        assert stopped.failure.code in ("transfer_failed", "unavailable") and stopped.bytes == 0
        assert time.monotonic() - began < within_s
