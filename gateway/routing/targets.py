"""The workers of a cluster that run the target model: what they last said, how all are asked at once, and how
one that is behind is brought up to the others.
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

LOOK_EVERY_S = 0.2  # names that nobody has do not make a gateway ask its workers more often
REPAIR_S = 5.0  # from one try to bring a worker up to the others to the next

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class WorkerAnswers(Generic[Answer]):
    """The answers of workers, and why others gave none, by worker in the order in which they were named."""

    answers: dict[str, Answer]
    failed: dict[str, EyasError]

    def whole(self, what: str, after: str = "") -> dict[str, Answer]:
        """All answers. Raises the first failure that is worse than Busy, if one failed, with a text that
        names all failures: how many workers `what`, and which do not. `after`: what follows from that.
        """
        if not self.failed:
            return self.answers
        failures = list(self.failed.values())
        worst = next((error for error in failures if not isinstance(error, Busy)), failures[0])
        others = "; ".join(f"{worker}: {error.message}" for worker, error in self.failed.items())
        count = f"{len(self.answers)} of {len(self.answers) + len(failures)} workers"
        raise type(worst)(f"{count} {what}, but not {others}{after}", param=worst.param)


class TargetWorkers:
    """`workers`: all of the cluster, as last heard of. `channels`: to them. `refresh` asks them anew."""

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
        """The workers that have loaded, as last heard of."""
        return [info for info in self._workers() if info.runs_target and not info.starting]

    def names(self) -> list[str]:
        """Their names. Raises Unavailable if there are none."""
        names = [info.worker for info in self.infos()]
        if not names:
            raise Unavailable("no worker is known that could be asked")
        return names

    def channel(self, worker: str) -> grpc.aio.Channel:
        """The channel to one of them."""
        return self._channels.get(worker)

    async def ask(
        self, workers: Iterable[str], call: Callable[[str], Awaitable[Answer]]
    ) -> WorkerAnswers[Answer]:
        """Calls all of these at once, by name."""
        answers: dict[str, Answer] = {}
        failed: dict[str, EyasError] = {}

        async def one(worker: str) -> Answer | EyasError:
            try:
                return await call(worker)
            except EyasError as error:
                return error

        names = list(workers)
        for worker, answer in zip(names, await asyncio.gather(*map(one, names)), strict=True):
            if isinstance(answer, EyasError):
                failed[worker] = answer
            else:
                answers[worker] = answer
        return WorkerAnswers(answers, failed)

    async def refresh(self) -> None:
        """Asks every worker now what it is."""
        await self._refresh()
        self._looked_at = time.monotonic()

    async def look(self) -> None:
        """The same, so that what another gateway changed is known here, but not more often than pays."""
        if self._looking is None or self._looking.done():
            if time.monotonic() - self._looked_at < LOOK_EVERY_S:
                return
            self._looking = asyncio.create_task(self.refresh(), name="look at workers")
        await asyncio.shield(self._looking)

    async def aclose(self) -> None:
        """Ends a look that is under way."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)


class WorkerRepairs:
    """Tries to bring workers up to the others: one per worker at a time, each begun `REPAIR_S` after the one
    before it at the earliest. `what`: the name of what is behind, for the log.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._began: dict[str, float] = {}  # monotonic seconds

    def __contains__(self, worker: str) -> bool:
        """Whether a try is under way."""
        return worker in self._tasks

    def begin(self, worker: str, repair: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begins a try, if it is time for one."""
        now = time.monotonic()
        if worker in self._tasks or now - self._began.get(worker, -REPAIR_S) < REPAIR_S:
            return
        self._began[worker] = now
        task = self._tasks[worker] = asyncio.create_task(repair(), name=f"{self._what} of {worker}")
        task.add_done_callback(lambda _: self._tasks.pop(worker))

    def forget(self, worker: str) -> None:
        """Drops what is known of a worker that is gone for good."""
        self._began.pop(worker, None)

    async def aclose(self) -> None:
        """Ends those under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
