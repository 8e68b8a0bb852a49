"""The composition root of `eyas worker`: a front in this process and its engine in another.

When one of the two ends, so does the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import uvloop

from eyas.common import logging as eyas_logging
from eyas.common.config import EngineConfig, WorkerConfig
from eyas.common.errors import DeadlineExceeded, Unavailable
from eyas.common.machine.folders import living_in
from eyas.common.machine.leave import StopSignals
from eyas.common.machine.processes import raise_limit
from eyas.worker import engine_main
from eyas.worker.engine_process import EngineProcess
from eyas.worker.link import ZmqFront, new_endpoint
from kv_transfer.host_files import sweep

if TYPE_CHECKING:
    from eyas.worker.front import WorkerFront

START_S = 600.0  # from the spawn to a loaded, warmed-up engine
LEAVE_S = 5.0  # from Shutdown to SIGKILL
LAST_MESSAGE_S = 0.5  # time for a dead engine's last message to arrive

EngineMain = Callable[[EngineConfig, str], None]


HANG_S = 60.0  # of consecutive polls that see the engine stalled
LOOK_S = 0.5  # between two polls


# A front reports soon that its engine is late, and requests wait for it. An engine that hangs must end, since
# a supervisor only restarts a process that has ended. `EngineLiveness` defines progress.
async def hung(stalls: Callable[[], bool], pid: int) -> NoReturn:
    """Waits until the engine, of process `pid`, has stalled for HANG_S; then raises Unavailable.

    A process that is stopped or traced does not count as stalled. Polls are counted, rather than time
    measured: a machine that was suspended has no engine that hangs.
    """
    polls = 0
    while polls * LOOK_S < HANG_S:
        await asyncio.sleep(LOOK_S)
        polls = polls + 1 if stalls() and not is_traced(pid) else 0
    raise Unavailable(f"the engine hangs: it has work, and made no progress for {HANG_S:.0f} s")


def is_traced(pid: int) -> bool:
    """Whether a signal has stopped the process, or a debugger traces it; False if that is unknown."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    fields = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return fields.get("State", "")[:1] in ("T", "t") or fields.get("TracerPid", "0") != "0"


def run_worker(
    config: WorkerConfig, engine: EngineMain = engine_main.main, process: EngineProcess | None = None
) -> None:
    """Serves until SIGINT or SIGTERM; then accepted requests have `drain_s` seconds to finish.

    A second signal, or SIGHUP, ends it immediately. Raises EyasError if the engine cannot start, dies or
    hangs.

    `engine` is the function that the engine process runs, with its config and the link's endpoint. `process`
    is that process (None: a new one), which is killed at the end.
    """
    eyas_logging.setup("worker", config.engine.log_format, config.engine.log_level)
    raise_limit()
    spawned = process or EngineProcess()
    try:
        uvloop.run(_run(config, engine, spawned))
    finally:
        spawned.kill(LEAVE_S)


async def _run(config: WorkerConfig, engine: EngineMain, spawned: EngineProcess) -> None:
    began = time.monotonic()
    endpoint = new_endpoint()
    with living_in(Path(config.engine.pool_dir)), contextlib.closing(ZmqFront(endpoint)) as link:
        process = _EngineHalf(engine, config, endpoint, spawned)
        try:
            if config.port:
                process.start(config.address)
            from eyas.worker.front import WorkerFront  # takes half a second, while the engine imports too

            await asyncio.sleep(0)  # raises CancelledError if Ctrl-C was pressed during the import
            front = WorkerFront(config, link)
            address = await front.start()
        except BaseException:
            process.kill()
            raise
        if not config.port:
            process.start(address)
        halves = [
            asyncio.create_task(_drain_on_signal(front, config.drain_s)),
            asyncio.create_task(front.run()),
            asyncio.create_task(process.died()),
            asyncio.create_task(hung(lambda: front.stalled, process.pid)),
        ]
        try:
            await _load(front, halves)
            if front.ready.done():
                _announce(config, address, front, time.monotonic() - began)
                await _first(halves)
        finally:
            await front.stop()
            await process.leave()
            for half in halves:
                half.cancel()
            await asyncio.gather(*halves, return_exceptions=True)


async def _drain_on_signal(front: WorkerFront, drain_s: float) -> None:
    """Returns when the worker must end. (An engine that has drained before that ends the worker itself.)"""
    leave = StopSignals()
    await leave.requested.wait()
    if front.ready.done() and not leave.now.is_set():
        await front.drain()
        await leave.within(drain_s)


async def _load(front: WorkerFront, halves: list[asyncio.Task[None]]) -> None:
    """Waits until the engine is ready or one of `halves` has ended. Raises DeadlineExceeded after START_S."""
    try:
        async with asyncio.timeout(START_S):
            await _first([front.ready, *halves])
    except TimeoutError:
        raise DeadlineExceeded(f"the engine was not ready after {START_S:.0f} s") from None


async def _first(parts: Sequence[asyncio.Future[Any]]) -> None:
    """Waits until one of `parts` ends; raises its error."""
    done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
    for part in done:
        part.result()


def _announce(config: WorkerConfig, address: str, front: WorkerFront, seconds: float) -> None:
    where = f"roles={','.join(config.engine.roles)} device={config.engine.device} address={address}"
    room = f"metrics-port={front.metrics_port} pages={front.ready.result().pages_total}"
    eyas_logging.announce(f"worker ready: {where} {room} in {seconds:.1f} s")


class _EngineHalf:
    """The engine process of a worker: starts the engine in it, and reports its end."""

    def __init__(
        self, engine: EngineMain, config: WorkerConfig, endpoint: str, process: EngineProcess
    ) -> None:
        """`endpoint`: the address of the link."""
        self._engine = engine
        self._config = config
        self._endpoint = endpoint
        self._process = process
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def start(self, address: str) -> None:
        """Runs the engine in the process; `address`: of the worker."""
        config = self._config
        spec = dataclasses.replace(config.engine, worker=address, encrypted=config.tls_dir is not None)
        self._process.run(self._engine, spec, self._endpoint)
        self._loop.add_reader(self._process.sentinel, self._on_end)

    @property
    def pid(self) -> int:
        """The id of the process, which may have ended."""
        return self._process.pid

    def _on_end(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._ended.set()

    async def died(self) -> None:
        """Waits for the end of the process and of its last message; then raises Unavailable."""
        await self._ended.wait()
        await asyncio.sleep(LAST_MESSAGE_S)
        raise Unavailable(f"the engine process ended with code {self._process.exit_code()}")

    async def leave(self) -> None:
        """Waits for the process to exit, kills it after LEAVE_S, and removes the files that it left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._ended.wait()
        self.kill()

    def kill(self) -> None:
        """Kills the process, if it still runs, and removes the files that it left."""
        self._process.kill(LEAVE_S)
        sweep(Path(self._config.engine.pool_dir))
