"""Copies that need an owner's help: bytes that come by gRPC, and pages in the staging of their owners.

`CopyPages` starts one that the engine cannot make: the bytes go straight into our own pool's file.
`CopyStopped` says that it is over, and that promises: nothing writes to its pages any more. No byte of a page
crosses the link to the engine.

`StageCopy` starts one that our engine reads in the owner's staging itself: `CopyStaged` names the slots,
`CopyRead` says that they have been read, `CopyStopped` that the owner has let go of them, and whether they
were held until then.
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

STALL_S = 5.0  # an owner that sends nothing for so long is given up
ANSWER_S = 8.0  # an owner that has named no slots by then, or not said that they were held, is given up
READ_S = 30.0  # longer than an owner holds slots: an engine that has not read them by then never will


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
        """Ends a fetch of a pull, or all of them; each is reported once it has ended."""
        for task in [task for (of, n), task in self._running.items() if of == pull and number in (None, n)]:
            task.cancel()

    async def close(self) -> None:
        """Ends everything that runs."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _fetch(self, job: CopyPages, group: KvKind, chunks: AsyncGenerator[memoryview, None]) -> int:
        """The bytes written. This task alone writes to the pages, and only between two of its waits."""
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
        """A task that is done writes no more: now the engine may do with the pages what it likes."""
        del self._running[job.pull, job.number]
        failure = failure_of(task, "a fetch of KV pages")
        moved = 0 if failure else task.result()
        self._engine.send(CopyStopped(job.pull, job.number, moved, time.monotonic() - began, failure))


def failure_of(task: asyncio.Task[Any], what: str) -> WireFailure | None:
    """How a copy's task failed, which is done; None if it did not. A defect is logged as one of `what`."""
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
        """Asks the owner; every end is reported."""
        read = asyncio.Event()
        task = asyncio.create_task(self._hold(job, staging, read))
        self._running[job.pull, job.number] = task, read
        task.add_done_callback(functools.partial(self._stopped, job, time.monotonic()))

    def read(self, event: CopyRead) -> None:
        """The engine has read the slots. Those that have ended were reported."""
        if (event.pull, event.number) in self._running:
            self._running[event.pull, event.number][1].set()

    def stop(self, pull: int, number: int | None = None) -> None:
        """Ends one of a pull, or all of them; each is reported once it has ended."""
        for (of, n), (task, _) in list(self._running.items()):
            if of == pull and number in (None, n):
                task.cancel()

    async def close(self) -> None:
        """Ends everything that runs."""
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
