"""Workers as they are: a real front around a real engine on tiny random models, all in this process.

A pool of its own folder makes a worker look like one of another host: no file of it can be found elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch

from eyas.common.config import EngineConfig, KvEventsConfig, WorkerConfig
from eyas.common.security.tls import service_tls
from eyas.common.types import GenerationRequest, KvHandle, Role
from eyas.common.wire import clients, message, rpc
from eyas.engine.ipc.messages import EngineLoad
from eyas.engine.loading.build import build_engine
from eyas.worker.front import WorkerFront
from tests.rpc.local_link import LocalEngine, LocalFront
from tests.unit.tiny import write_tiny_pair
from tests.unit.unwarmed import unwarmed


def tiny_config(folder: Path) -> EngineConfig:
    """An engine of a tiny target and head, which are written to `folder`."""
    write_tiny_pair(folder)
    return EngineConfig(
        model=str(folder / "target"), draft=str(folder / "head"), num_pages=128, chunk_tokens=48
    )


class RealWorker:
    """`engine` is the engine itself: look at it only while it is idle. `timed`: requests are routed by how
    long its steps take. `changes`: of its front's config.
    """

    def __init__(
        self,
        config: EngineConfig,
        registry: str,
        port: int = 0,
        tls_dir: str | None = None,
        *,
        timed: bool = False,
        **changes: Any,
    ) -> None:
        self._timed = timed
        self._config = WorkerConfig(engine=config, registry=registry, port=port, tls_dir=tls_dir, **changes)
        self.dial = rpc.dialer(service_tls(tls_dir))
        self._stopped = False

    async def start(self) -> RealWorker:
        torch.set_num_threads(1)
        Path(self._config.engine.pool_dir).mkdir(exist_ok=True)
        link = LocalFront()
        self.front = WorkerFront(self._config, link)
        self.address = await self.front.start()
        config = dataclasses.replace(
            self._config.engine, worker=self.address, encrypted=self._config.tls_dir is not None
        )
        with unwarmed(timed=self._timed):
            self.engine: Any = build_engine(config, LocalEngine(link))
        self._thread = threading.Thread(target=self.engine.run, daemon=True)
        self._thread.start()
        self._running = asyncio.create_task(self.front.run())
        await asyncio.wait_for(asyncio.shield(self.front.ready), 30)
        return self

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        await self.front.stop()
        await asyncio.wait_for(self._running, 30)
        self._thread.join(10)

    @property
    def load(self) -> EngineLoad:
        return self.front._load

    async def idle(self) -> None:
        """Until every command was heard, and nothing is held but what the prefix cache keeps."""
        async with asyncio.timeout(30):
            while self.front._liveness._has_work or self._holds():
                await asyncio.sleep(0.02)

    def _holds(self) -> bool:
        load = self.load
        return bool(load.running or load.waiting or load.pages_used or not load.progress)

    def pages(self, tokens: tuple[int, ...]) -> bytes:
        """The cached pages of a prompt, all but those of its last rows."""
        cache, pool = self.engine._parts.scheduler.cache, self.engine._parts.scheduler.pool
        numbers = cache.match(tokens)
        pool.drop(numbers)
        return self.engine._parts.pools[0].tensor[numbers].numpy().tobytes()


@contextlib.asynccontextmanager
async def real_worker(
    config: EngineConfig,
    *roles: Role,
    registry: str = "static:",
    tls_dir: str | None = None,
    events: KvEventsConfig | None = None,
    **changes: Any,
) -> AsyncIterator[RealWorker]:
    """`changes` are those of the engine's config."""
    engine = dataclasses.replace(config, roles=roles, kv_events=events is not None, **changes)
    started = await RealWorker(engine, registry, tls_dir=tls_dir, events=events).start()
    try:
        yield started
    finally:
        await started.stop()


async def prefill(
    worker: RealWorker, request: GenerationRequest, *, draft: bool = False
) -> tuple[KvHandle, ...]:
    """The handles of a prompt that `worker` has computed; `draft`: of its draft KV too."""
    async with worker.dial(worker.address) as channel:
        events = [event async for event in clients.PrefillClient(channel).prefill(request, 1, draft)]
    return events[1].handles


class Decode:
    """One session on a decode worker, and what it said of each request."""

    def __init__(self, worker: RealWorker, channel: Any) -> None:
        self.session = clients.DecodeSessionClient(channel, worker.address).open()
        self.events = aiter(self.session)

    def attach(self, request: GenerationRequest, handles: tuple[KvHandle, ...]) -> None:
        """Submits a request that pulls `handles`, as attempt 2."""
        self.session.submit(request, attempt=1, attach=True)
        self.session.attach(request.id, 2, handles, ())

    async def next(self, *kinds: type) -> Any:
        async with asyncio.timeout(30):
            async for event in self.events:
                if isinstance(event, kinds):
                    return event

    async def tokens(self) -> tuple[list[int], str]:
        """All tokens of the only request, and the path that its KV took."""
        tokens: list[int] = []
        path = ""
        while True:
            for entry in (await self.next(message.StepReply)).entries:
                tokens[entry.index :] = entry.tokens
                path = entry.timings.transfer_path if entry.timings else path
                if entry.finish is not None:
                    return tokens, path


@contextlib.asynccontextmanager
async def decoding(worker: RealWorker) -> AsyncIterator[Decode]:
    async with worker.dial(worker.address) as channel:
        decode = Decode(worker, channel)
        yield decode
        decode.session.close()


async def alone(config: EngineConfig, pools: Path, *requests: GenerationRequest) -> list[list[int]]:
    """What a worker answers that computes everything itself, one request after the other."""
    async with real_worker(config, *Role, pool_dir=str(pools)) as worker, decoding(worker) as decode:
        answers = []
        for request in requests:
            decode.session.submit(request, attempt=1, attach=False)
            answers.append((await decode.tokens())[0])
        return answers
