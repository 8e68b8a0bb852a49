"""Pages in the staging of their owners, which our engine reads there itself: asked for, held, given back.

`StageCopy` starts one, `CopyStaged` names the slots, `CopyRead` says that they have been read, `CopyStopped`
that the owner has let go of them, and whether they were held until then. No byte passes here.
"""

from __future__ import annotations

import asyncio
import functools
import time

from eyas.common.errors import TransferFailed
from eyas.common.wire.watch import Staging
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import CopyRead, CopyStaged, CopyStopped, StageCopy
from eyas.worker.fetches import failure_of

ANSWER_S = 8.0  # an owner that has named no slots by then, or not said that they were held, is given up
READ_S = 30.0  # longer than an owner holds slots: an engine that has not read them by then never will


class OpenStagings:
    """Owner of the open calls to Stage."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._running: dict[tuple[int, int], tuple[asyncio.Task[None], asyncio.Event]] = {}

    def start(self, job: StageCopy, staging: Staging) -> None:
        """Asks the owner; however it ends, it is told."""
        read = asyncio.Event()
        task = asyncio.create_task(self._hold(job, staging, read))
        self._running[job.pull, job.number] = task, read
        task.add_done_callback(functools.partial(self._stopped, job, time.monotonic()))

    def read(self, event: CopyRead) -> None:
        """The engine has read the slots. What has ended meanwhile was told."""
        if (event.pull, event.number) in self._running:
            self._running[event.pull, event.number][1].set()

    def stop(self, pull: int, number: int | None = None) -> None:
        """Ends one of a pull, or all of them; each is told once it has ended."""
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
