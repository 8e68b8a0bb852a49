"""The workers that run the target model: their last reports, calls to all of them, and repairs of workers
whose adapters or weights are older than those of the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from eyas.common.errors import Busy, EyasError, Unavailable
from eyas.common.types import WorkerInfo
from eyas.common.wire.rpc import ChannelPool

LOOK_EVERY_S = 0.2  # bounds how often calls with unknown names make a gateway poll its workers
REPAIR_S = 5.0  # from the start of one repair of a worker to the next

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class WorkerAnswers(Generic[Answer]):
    """The answers and the errors of workers, each by worker in the order of the call."""

    answers: dict[str, Answer]
    failed: dict[str, EyasError]

    def whole(self, what: str, after: str = "") -> dict[str, Answer]:
        """All answers. If a worker failed, raises the first error other than Busy, or Busy, with a message
        that names all failures: "2 of 3 workers `what`, but not ...", followed by `after`.
        """
        if not self.failed:
            return self.answers
        failures = list(self.failed.values())
        worst = next((error for error in failures if not isinstance(error, Busy)), failures[0])
        others = "; ".join(f"{worker}: {error.message}" for worker, error in self.failed.items())
        count = f"{len(self.answers)} of {len(self.answers) + len(failures)} workers"
        raise type(worst)(f"{count} {what}, but not {others}{after}", param=worst.param)


class TargetWorkers:
    """`workers` returns the last reports of all workers of the cluster; `refresh` polls them. `channels`: to
    the workers.
    """

    def __init__(
        self,
        workers: Callable[[], Sequence[WorkerInfo]],
        channels: ChannelPool,
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        self._workers = workers
        self._channels = channels
        self._refresh = refresh
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = 0.0

    def infos(self) -> list[WorkerInfo]:
        """The last reports of the workers that have loaded the model."""
        return [info for info in self._workers() if info.runs_target and not info.starting]

    def names(self) -> list[str]:
        """The names of these workers. Raises Unavailable if there are none."""
        names = [info.worker for info in self.infos()]
        if not names:
            raise Unavailable("no worker is known that could be asked")
        return names

    def channel(self, worker: str) -> grpc.aio.Channel:
        """The channel to a worker."""
        return self._channels.get(worker)

    async def ask(
        self, workers: Iterable[str], call: Callable[[str], Awaitable[Answer]]
    ) -> WorkerAnswers[Answer]:
        """Runs `call` for all of these workers concurrently, by name."""
        answers: dict[str, Answer] = {}
        failed: dict[str, EyasError] = {}

        async def answer_of(worker: str) -> Answer | EyasError:
            try:
                return await call(worker)
            except EyasError as error:
                return error

        names = list(workers)
        for worker, answer in zip(names, await asyncio.gather(*map(answer_of, names)), strict=True):
            if isinstance(answer, EyasError):
                failed[worker] = answer
            else:
                answers[worker] = answer
        return WorkerAnswers(answers, failed)

    async def refresh(self) -> None:
        """Polls the state of every worker now."""
        await self._refresh()
        self._looked_at = time.monotonic()

    async def look(self) -> None:
        """Polls the state of every worker, at most once per LOOK_EVERY_S; concurrent calls share one poll."""
        if self._looking is None or self._looking.done():
            if time.monotonic() - self._looked_at < LOOK_EVERY_S:
                return
            self._looking = asyncio.create_task(self.refresh(), name="look at workers")
        await asyncio.shield(self._looking)

    async def aclose(self) -> None:
        """Cancels a running poll."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)


class WorkerRepairs:
    """Runs repairs of workers as tasks: one per worker at a time, and at most one per `REPAIR_S`. `what`: the
    thing that is repaired, for the names of the tasks.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._began: dict[str, float] = {}  # monotonic seconds

    def __contains__(self, worker: str) -> bool:
        """Whether a repair of the worker runs."""
        return worker in self._tasks

    def begin(self, worker: str, repair: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Starts a repair, unless one runs or has started less than REPAIR_S ago."""
        now = time.monotonic()
        if worker in self._tasks or now - self._began.get(worker, -REPAIR_S) < REPAIR_S:
            return
        self._began[worker] = now
        task = self._tasks[worker] = asyncio.create_task(repair(), name=f"{self._what} of {worker}")
        task.add_done_callback(lambda _: self._tasks.pop(worker))

    def forget(self, worker: str) -> None:
        """Drops the state of a worker that has left."""
        self._began.pop(worker, None)

    async def aclose(self) -> None:
        """Cancels the running repairs."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
