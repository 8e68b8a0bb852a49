"""Updates the weights of a cluster, on all of its workers or on none.

An update is prepared on every worker, then every worker is closed, then all commit (`eyas.common.weights`). A
failure before the first commit undoes the update: the old weights continue to serve. After the first commit
the update is final: a worker that fails then is behind, like one that starts later with old weights.

Workers report their weights, so gateways need no state of their own and do not communicate: the greatest
generation counts. A worker that is behind gets no requests. The first gateway that sees it repairs it: a
worker that had already prepared the newest weights commits them, another one loads them if they came from a
folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from eyas.common.errors import Busy, EyasError, InvalidRequest, Unavailable
from eyas.common.types import WeightsInfo, WorkerInfo
from eyas.common.weights import (
    PREPARE_S,
    CheckJoin,
    CloseForWeights,
    CommitWeights,
    DropWeights,
    FolderSource,
    JoinGroup,
    LeaveGroup,
    PrepareWeights,
    ReadWeight,
    Running,
    Source,
    WeightsCommand,
    WeightsReply,
)
from eyas.common.wire.control_service import ControlClient
from gateway.routing.targets import TargetWorkers, WorkerAnswers, WorkerRepairs

COMMIT_S = 120.0
HOLD_S = 30.0  # a closed worker without a message for this time opens again with the old weights
ASK_S = 30.0
SERVE_ON = "; the old weights serve on"
_log = logging.getLogger("eyas.gateway")


@dataclass(frozen=True)
class WeightUpdate:
    """New weights for a cluster. `version`: their name; "": the number of the update. `whole`: they have all
    tensors of the model; otherwise missing tensors stay. `wait_s`: for running requests, if `running` waits
    for them.
    """

    source: Source
    version: str
    whole: bool
    running: Running
    wait_s: float


@dataclass(frozen=True)
class WeightsChange:
    """A completed update. `requests`: the number of requests that it ended. `seconds`: the time without steps
    on the slowest worker. `behind`: workers that failed, with their errors.
    """

    weights: WeightsInfo
    tensors: int
    nbytes: int
    requests: int
    seconds: float
    workers: tuple[str, ...]
    behind: dict[str, str]


class ClusterWeights:
    """Implements `WeightControl` (`gateway.backends.base`). Its owner calls `follow` periodically."""

    def __init__(self, targets: TargetWorkers) -> None:
        self._targets = targets
        self.newest = WeightsInfo()  # of all that any worker has reported
        self._change = asyncio.Lock()
        self._repairs = WorkerRepairs("weights")

    # --- the weights of workers ------------------------------------------------------------------------

    def follow(self) -> None:
        """Updates `newest` from the last reports, and starts to repair the workers that are behind."""
        infos = self._targets.infos()
        self._count_all(infos)
        for info in infos:
            if self.is_behind(info) and not self._change.locked():
                self._repairs.begin(info.worker, partial(self._repair, info.worker))

    def is_behind(self, info: WorkerInfo) -> bool:
        """Whether the worker does not have the newest weights, and so gets no requests."""
        return info.runs_target and info.weights.digest != self.newest.digest

    def with_serving(self, infos: Sequence[WorkerInfo]) -> list[WorkerInfo]:
        """Returns the workers, those that are behind as not serving. Updates `newest` first: another gateway
        may have updated the weights.
        """
        self._count_all(infos)
        return [self._serving(info) for info in infos]

    def _serving(self, info: WorkerInfo) -> WorkerInfo:
        if not self.is_behind(info):
            return info
        own, new = info.weights.version, self.newest.version
        text = f"it has the weights {own!r}, and the cluster {new!r}"
        return msgspec.structs.replace(
            info, serving=False, trouble="; ".join(filter(None, (info.trouble, text)))
        )

    def is_coming(self, info: WorkerInfo) -> bool:
        """Whether the worker will serve the newest weights soon: it is closed for them, loads them, or has
        just committed them and not reported since.
        """
        unreported = self._change.locked() and self.is_behind(info)
        return info.runs_target and (info.weights.closed or info.worker in self._repairs or unreported)

    @property
    def problem(self) -> str:
        """Which workers are behind and cannot be repaired, as half a sentence; empty if none is."""
        if self.newest.folder:
            return ""
        infos = self._targets.infos()
        behind = [info.worker for info in infos if self.is_behind(info) and not self.is_coming(info)]
        if not behind:
            return ""
        return f"{', '.join(behind)} lost the weights {self.newest.version!r}: update them again"

    async def look(self) -> None:
        """Updates `newest` from all workers: another gateway may have changed it."""
        await self._targets.look()
        self.follow()

    def forget(self, worker: str) -> None:
        """Drops the state of a worker that has left."""
        self._repairs.forget(worker)

    async def aclose(self) -> None:
        """Cancels the repairs."""
        await self._repairs.aclose()

    def _count_all(self, infos: Sequence[WorkerInfo]) -> None:
        for info in infos:
            self._count(info.weights)

    def _count(self, weights: WeightsInfo) -> None:
        if (weights.generation, weights.digest) > (self.newest.generation, self.newest.digest):
            self.newest = msgspec.structs.replace(weights, closed=False)

    # --- updates ---------------------------------------------------------------------------------------

    async def update(self, update: WeightUpdate) -> WeightsChange:
        """See `WeightControl.update`. A started update continues if its caller is cancelled."""
        if self._change.locked():
            raise Busy("another update of the weights is under way")
        return await asyncio.shield(asyncio.create_task(self._update(update), name="update of weights"))

    async def _update(self, update: WeightUpdate) -> WeightsChange:
        async with self._change:
            await self._targets.refresh()
            self._count_all(self._targets.infos())
            workers = self._targets.names()
            generation = self.newest.generation + 1
            version = update.version or str(generation)
            command = PrepareWeights(version, generation, update.source, update.whole)
            prepared = await self._ask(workers, command, PREPARE_S)
            try:
                digest = _agreed(prepared.whole("prepared the weights", SERVE_ON))
                close = CloseForWeights(digest, update.running, update.wait_s, HOLD_S)
                closing = await self._close(workers, close)
                closed = closing.whole("ended what runs", SERVE_ON)
                done = await self._commit(workers, digest)
            except EyasError:
                await self._drop(prepared.answers)
                raise
            folder = update.source.path if isinstance(update.source, FolderSource) else ""
            seconds = max(reply.seconds for reply in done.answers.values())
            self._count(WeightsInfo(version, generation, digest, folder, seconds=seconds))
            await self._targets.refresh()
            sizes = next(iter(prepared.answers.values()))
            return WeightsChange(
                weights=self.newest,
                tensors=sizes.tensors,
                nbytes=sizes.nbytes,
                requests=sum(reply.requests for reply in closed.values()),
                seconds=seconds,
                workers=tuple(done.answers),
                behind={worker: error.message for worker, error in done.failed.items()},
            )

    async def _close(self, workers: Iterable[str], close: CloseForWeights) -> WorkerAnswers[WeightsReply]:
        """Closes workers. Repeats the call to those that finished early: otherwise they would open again
        after HOLD_S, before the others have finished.
        """
        reminders = asyncio.create_task(self._remind(workers, close), name="reminders of an update")
        try:
            return await self._ask(workers, close, close.wait_s + ASK_S)
        finally:
            reminders.cancel()

    async def _remind(self, workers: Iterable[str], close: CloseForWeights) -> None:
        while True:
            await asyncio.sleep(HOLD_S / 3)
            await self._ask(workers, close, ASK_S)

    async def _commit(self, workers: Iterable[str], digest: str) -> WorkerAnswers[WeightsReply]:
        """Commits on all workers. Raises the first error if no worker has committed."""
        done = await self._ask(workers, CommitWeights(digest), COMMIT_S)
        if not done.answers:
            raise next(iter(done.failed.values()))
        for worker, error in done.failed.items():
            _log.warning("worker %s did not get its new weights: %s", worker, error)
        return done

    async def _drop(self, prepared: dict[str, WeightsReply]) -> None:
        """Has workers drop the prepared weights, and open again if they are closed."""
        for worker, reply in prepared.items():
            with contextlib.suppress(EyasError):  # it opens by itself
                await self._client(worker).change(DropWeights(reply.digest), ASK_S)
        await self._targets.refresh()

    async def read(self, name: str, count: int) -> tuple[float, ...]:
        """See `WeightControl.read`."""
        info = next((info for info in self._targets.infos() if not self.is_behind(info)), None)
        if info is None:
            raise Unavailable("no worker is known that could be asked")
        return (await self._client(info.worker).change(ReadWeight(name, count), ASK_S)).numbers

    async def join(self, command: JoinGroup) -> tuple[str, ...]:
        """See `WeightControl.join`: worker after worker, by name, from `command.rank` on."""
        workers = sorted(self._targets.names())
        if command.rank + len(workers) > command.size:
            text = f"{len(workers)} workers from rank {command.rank} on need a larger group"
            raise InvalidRequest(f"{text} than one of {command.size}", param="world_size")
        check = await self._ask(workers, CheckJoin(command.group, command.backend), ASK_S)
        check.whole("could join the group")  # before any worker waits for the others
        wait_s = command.wait_s + ASK_S

        async def join_as(rank: int, worker: str) -> WeightsReply:
            own = msgspec.structs.replace(command, rank=rank)
            return await self._client(worker).change(own, wait_s)

        try:
            await asyncio.gather(
                *(join_as(rank, worker) for rank, worker in enumerate(workers, command.rank))
            )
        except EyasError:
            await self._ask(workers, LeaveGroup(command.group), ASK_S)
            raise
        return tuple(workers)

    async def leave(self, group: str) -> None:
        """See `WeightControl.leave`."""
        left = await self._ask(self._targets.names(), LeaveGroup(group), ASK_S)
        left.whole(f"left the group {group!r}")

    async def _repair(self, worker: str) -> None:
        """Updates a worker that is behind to the newest weights, if possible."""
        newest = self.newest
        try:
            client = self._client(worker)
            try:
                await client.change(CommitWeights(newest.digest), COMMIT_S)
            except EyasError:
                if not newest.folder:
                    _log.warning("worker %s is behind: %s are lost", worker, newest.version)
                    return
                source = FolderSource(newest.folder)
                command = PrepareWeights(newest.version, newest.generation, source, whole=True)
                prepared = await client.change(command, PREPARE_S)
                if prepared.digest != newest.digest:
                    raise InvalidRequest(f"{newest.folder} has other weights by now") from None
                close = CloseForWeights(newest.digest, Running.ABORT, ASK_S, HOLD_S)
                await client.change(close, 2 * ASK_S)
                await client.change(CommitWeights(newest.digest), COMMIT_S)
            _log.info("worker %s has the weights %r too", worker, newest.version)
            await self._targets.refresh()
        except EyasError as error:
            _log.warning("worker %s stays behind: %s", worker, error)

    # --- calls to workers ------------------------------------------------------------------------------

    def _client(self, worker: str) -> ControlClient:
        return ControlClient(self._targets.channel(worker))

    async def _ask(
        self, workers: Iterable[str], command: WeightsCommand, wait_s: float
    ) -> WorkerAnswers[WeightsReply]:
        return await self._targets.ask(workers, lambda worker: self._client(worker).change(command, wait_s))


def _agreed(prepared: dict[str, WeightsReply]) -> str:
    """The digest that all workers report. Raises InvalidRequest if they read different weights."""
    digests = {worker: reply.digest for worker, reply in prepared.items()}
    if len(set(digests.values())) > 1:
        each = ", ".join(f"{worker}: {digest}" for worker, digest in digests.items())
        raise InvalidRequest(f"the workers read different weights ({each}){SERVE_ON}")
    return next(iter(digests.values()))
