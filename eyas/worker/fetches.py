"""Copies of KV pages that need a call to their owner: bytes over gRPC, and reads from the owner's staging.

`CopyPages` starts a copy over gRPC: the front writes the bytes directly into the pool file of its own engine,
so no byte of a page crosses the link to the engine. `CopyStopped` reports its end, and guarantees that
nothing writes to its pages any more.

`StageCopy` starts a copy that the engine itself reads from the owner's staging: `CopyStaged` names the slots,
`CopyRead` reports that the engine has read them, and `CopyStopped` reports that the owner has released them,
and whether they stayed valid until they were read.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator
from typing import Any

from eyas.common.errors import Cancelled, TransferFailed
from eyas.common.types import KvKind
from eyas.common.wire import rpc
from eyas.common.wire.transfer import Staging
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import CopyPages, CopyRead, CopyStaged, CopyStopped, StageCopy, WireFailure
from kv_transfer.backends.stream import PageWriter

STALL_S = 5.0  # the longest pause between two chunks of an owner
ANSWER_S = 8.0  # in which an owner names the slots, and in which it confirms that they stayed valid
READ_S = 30.0  # for the engine to read the slots; longer than an owner reserves them


class FetchTasks:
    """Owner of the running fetches, which write to the engine's pools."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._running: dict[tuple[int, int], asyncio.Task[int]] = {}  # by pull and number

    def start(self, job: CopyPages, group: KvKind, chunks: AsyncGenerator[memoryview, None]) -> None:
        """Writes `chunks` into `job.dst_pages` of our pool of `group`; every end is reported."""
        task = asyncio.create_task(self._fetch(job, group, chunks))
        self._running[job.pull, job.number] = task
        task.add_done_callback(functools.partial(self._stopped, job, time.monotonic()))

    def stop(self, pull: int, number: int | None = None) -> None:
        """Cancels one fetch of a pull (None: all of them); the end of each is reported."""
        for task in [task for (of, n), task in self._running.items() if of == pull and number in (None, n)]:
            task.cancel()

    async def close(self) -> None:
        """Cancels all fetches and waits for their ends."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _fetch(self, job: CopyPages, group: KvKind, chunks: AsyncGenerator[memoryview, None]) -> int:
        """Writes the chunks; returns the number of bytes. Only this task writes to these pages, and it never
        awaits in the middle of a write.
        """
        clock = asyncio.get_running_loop().time
        async with contextlib.aclosing(chunks):
            writer = PageWriter(self._engine.pages(group), job.dst_pages, job.width)
            try:
                async with asyncio.timeout(STALL_S) as stall:
                    async for chunk in chunks:
                        writer.write(chunk)
                        stall.reschedule(clock() + STALL_S)
            except TimeoutError:
                raise TransferFailed(f"the owner of the pages sent nothing for {STALL_S:g} s") from None
            writer.finish()
        return writer.bytes

    def _stopped(self, job: CopyPages, began: float, task: asyncio.Task[int]) -> None:
        """Reports a finished task, which writes no more: the engine may now reuse the pages."""
        del self._running[job.pull, job.number]
        failure = failure_of(task, "a fetch of KV pages")
        moved = 0 if failure else task.result()
        self._engine.send(CopyStopped(job.pull, job.number, moved, time.monotonic() - began, failure))


def failure_of(task: asyncio.Task[Any], what: str) -> WireFailure | None:
    """The failure of a copy's finished task; None if it succeeded. Unexpected errors are logged as `what`."""
    if task.cancelled():
        return WireFailure.of(Cancelled("the pull was given up"))
    error = task.exception()
    return WireFailure.of(rpc.as_eyas(error, what)) if isinstance(error, Exception) else None


class OpenStagings:
    """Owner of the open calls to Stage."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._running: dict[tuple[int, int], tuple[asyncio.Task[None], asyncio.Event]] = {}

    def start(self, job: StageCopy, staging: Staging) -> None:
        """Opens a call to the owner; every end is reported."""
        read = asyncio.Event()
        task = asyncio.create_task(self._hold(job, staging, read))
        self._running[job.pull, job.number] = task, read
        task.add_done_callback(functools.partial(self._stopped, job, time.monotonic()))

    def read(self, event: CopyRead) -> None:
        """Records that the engine has read the slots. A call that has ended was reported already."""
        if (event.pull, event.number) in self._running:
            self._running[event.pull, event.number][1].set()

    def stop(self, pull: int, number: int | None = None) -> None:
        """Cancels one call of a pull (None: all of them); the end of each is reported."""
        for (of, n), (task, _) in list(self._running.items()):
            if of == pull and number in (None, n):
                task.cancel()

    async def close(self) -> None:
        """Cancels all calls and waits for their ends."""
        running = [task for task, _ in self._running.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _hold(self, job: StageCopy, staging: Staging, read: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(ANSWER_S) as limit, staging as staged:
                self._engine.send(CopyStaged(job.pull, job.number, staged.slots))
                limit.reschedule(asyncio.get_running_loop().time() + READ_S)
                await read.wait()
                limit.reschedule(asyncio.get_running_loop().time() + ANSWER_S)
                await staged.read()
        except TimeoutError:
            raise TransferFailed("the owner of the pages did not answer while they were staged") from None

    def _stopped(self, job: StageCopy, began: float, task: asyncio.Task[None]) -> None:
        del self._running[job.pull, job.number]
        failure = failure_of(task, "staging of KV pages")
        self._engine.send(CopyStopped(job.pull, job.number, 0, time.monotonic() - began, failure))
