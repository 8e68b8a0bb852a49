"""The workers behind this gateway: their load, their caches, and the channels and sessions to them.

`Cluster` reads a registry and owns the channels and sessions. `WorkerSearch` repeats the choice of `router`
until a worker can serve a request; `generate` runs the request there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from eyas.common.cluster.discovery import WorkerRegistry
from eyas.common.errors import EyasError, ModelNotFound, TransferFailed, Unavailable, WeightsChanging
from eyas.common.page_names import PageShape
from eyas.common.types import KvHandle, Role, WorkerInfo
from eyas.common.wire import rpc
from eyas.common.wire.clients import DecodeSessionClient, InfoClient, PrefillClient
from eyas.common.wire.control import ControlCommand, ControlOutcome, ReleaseMemory, ResumeMemory
from eyas.common.wire.control_service import ControlClient
from eyas.common.wire.transfer import TransferClient
from gateway.backends.retries import RetryBudget
from gateway.backends.sessions import WorkerSession
from gateway.limits.queues import ReadQueue
from gateway.routing import router
from gateway.routing.adapters import ClusterAdapters
from gateway.routing.breakers import WorkerBreakers
from gateway.routing.in_flight import InFlightLedger, LegLoad, UnderWay
from gateway.routing.prefix_caches import CachedPrefixes, CacheWatch, PrefixIndex, PromptPages
from gateway.routing.router import RouterCandidate, adapter_state, affinity
from gateway.routing.targets import TargetWorkers
from gateway.routing.weights import ClusterWeights

FOLLOW_S = 0.25
SENT_S = 10.0
"""For this time after a prompt was sent to a worker, its pages are assumed to be cached there soon, although
the worker does not report them yet."""

NONE = PromptPages()
RETIRE_S = 60.0  # a worker that no registry has listed for this time loses its channel

_log = logging.getLogger("eyas.gateway")
PATIENCE_S = 4.0  # a search continues for this time while no suitable worker serves or is expected

Choice = TypeVar("Choice")


class Cluster:
    """The routing targets: workers of one model, a session per decode worker, requests in flight.

    The first target worker fixes the model and the arithmetic, and the first decode worker whether drafts are
    accepted by chance (benchmarks). Workers that differ get no requests, so every answer comes from one
    model; nor do workers with another tokenizer than the gateway's, `tokenizer` ("": not compared). A session
    reconnects by itself and outlives its worker; it ends when the registry has not listed the worker for
    `RETIRE_S`. `pace` schedules large prompts that are sent to workers.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        dial: rpc.Dial = rpc.channel,
        pace: ReadQueue | None = None,
        tokenizer: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self.pace = pace or ReadQueue()
        self._registry = registry
        self._channels = rpc.ChannelPool(dial)
        self._sessions: dict[str, WorkerSession] = {}
        self._ledger = InFlightLedger()
        self._sent = PrefixIndex()
        self._breakers = WorkerBreakers()
        self.retry_budget = RetryBudget(time.monotonic())
        self._holdings = CachedPrefixes()
        self._watch = CacheWatch(self._channels, self._holdings)
        self._targets = TargetWorkers(self._own_workers, self._channels, registry.refresh)
        self.adapters = ClusterAdapters(self._targets)
        self.weights = ClusterWeights(self._targets)
        self._known_at: dict[str, float] = {}  # by worker with a channel, monotonic seconds
        self._fingerprint = self._arithmetic = ""
        self._synthetic: bool | None = None
        self._reported: set[tuple[str, str]] = set()  # (worker, difference) in the log
        self._task: asyncio.Task[None] | None = None
        self._returns: set[asyncio.Task[None]] = set()  # of handles, to their owners

    async def start(self) -> None:
        """Reads the registry and opens sessions, then keeps doing so until `aclose`."""
        await self._registry.start()
        self.adapters.follow()
        self.weights.follow()
        self._open_sessions()
        self._task = asyncio.create_task(self._follow(), name="cluster")

    async def aclose(self) -> None:
        """Closes the sessions, the registry and the channels."""
        ending = [*self._returns, *([] if self._task is None else [self._task])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._watch.aclose()
        await self.adapters.aclose()
        await self.weights.aclose()
        await self._targets.aclose()
        await asyncio.gather(*(session.aclose() for session in self._sessions.values()))
        await self._registry.aclose()
        await self._channels.close()

    def workers(self) -> list[WorkerInfo]:
        """The workers that may get requests, from the last snapshot."""
        return self.weights.with_serving(self._own_workers())

    def _own_workers(self) -> list[WorkerInfo]:
        return [info for info in self._registry.workers() if self._is_ours(info)]

    def candidates(self, prefix: PromptPages = NONE) -> list[RouterCandidate]:
        """Returns those workers as the router's candidates for a prompt with this prefix."""
        now = time.monotonic()
        return [
            RouterCandidate(
                info,
                in_flight=self._ledger.now(info.worker).total,
                connected=self._connected(info.worker),
                cached=self._cached(info, prefix),
                under_way=self._ledger.now(info.worker),
                reported=self._ledger.at_report(info),
                affinity=affinity(prefix.session or prefix.adapter, info.worker),
                broken=not self._breakers.of(info.worker, info.epoch).allows(now),
                adapter=adapter_state(prefix.adapter, info),
            )
            for info in self.workers()
        ]

    def returning(self, prefix: PromptPages = NONE) -> list[RouterCandidate]:
        """Workers that are starting, were just lost, wait for new weights, or do not have the prompt's
        adapter yet, as candidates in the state in which they will serve.
        """
        infos = [info for info in self._registry.returning() if info.starting or self._is_ours(info)]
        infos += [info for info in self._own_workers() if self.weights.is_coming(info)]
        if prefix.adapter and prefix.adapter in self.adapters.roster.ids:
            infos += [info for info in self.workers() if adapter_state(prefix.adapter, info) is None]
        return [RouterCandidate(msgspec.structs.replace(info, serving=True)) for info in infos]

    def missing(self, workers: Sequence[RouterCandidate]) -> str:
        """Why no request can be routed to `workers`, as half a sentence."""
        why, trouble = router.missing(workers), self._registry.trouble()
        return f"{why} ({trouble})" if trouble else why

    def check_adapter(self, prefix: PromptPages) -> None:
        """Raises ModelNotFound if the prompt's adapter has been unloaded from the cluster."""
        if prefix.adapter and prefix.adapter not in self.adapters.roster.ids:
            raise ModelNotFound("the request's adapter has been unloaded", param="model")

    def record_prompt(self, worker: str, prompt: int, prefix: PromptPages) -> int:
        """Records that a prompt of `prompt` tokens with this prefix is sent to `worker`.

        Returns the estimated number of its tokens that are not cached there.
        """
        info = self._find_worker(worker)
        if info is None:
            return prompt
        missing, now = prompt - self._cached(info, prefix), time.monotonic()
        self._sent.add((worker, info.epoch), prefix.blocks, now)
        self._breakers.note(worker, info.epoch, self._breakers.of(worker, info.epoch).sent(now))
        return missing

    def record_outcome(self, worker: str, error: EyasError | None = None) -> None:
        """Records that `worker` completed a request, or failed it by a fault that is not the caller's."""
        own = isinstance(error, Unavailable | TransferFailed) or type(error) is EyasError
        own = own and not isinstance(error, WeightsChanging)
        info = self._find_worker(worker)
        if info is None or (error is not None and not own):
            return
        known = self._breakers.of(worker, info.epoch)
        new = known.succeeded() if error is None else known.failed(time.monotonic())
        if known.allows(0.0) and not new.allows(0.0):
            _log.warning("worker %s fails what it is sent: others are preferred", worker)
        self._breakers.note(worker, info.epoch, new)

    def _find_worker(self, worker: str) -> WorkerInfo | None:
        """The worker of this name, if it may get requests."""
        return next((info for info in self.workers() if info.worker == worker), None)

    def _cached(self, info: WorkerInfo, prefix: PromptPages) -> int:
        """Tokens at the start of the prompt that the worker reports as cached or was just sent."""
        holding = self._holdings.of(info.worker, info.epoch)
        shape = PageShape() if holding is None else holding.shape
        since = 0.0 if holding is None else max(time.monotonic() - SENT_S, holding.emptied)
        sent = self._sent.matched((info.worker, info.epoch), prefix.blocks, since)
        sent -= sent % shape.size
        return sent if holding is None else max(sent, holding.matched(prefix))

    def session(self, worker: str) -> WorkerSession:
        """The open or reconnecting session of a decode worker among `workers`."""
        return self._sessions[worker]

    def prefill_client(self, worker: str) -> PrefillClient:
        """A client over the shared channel to `worker`."""
        return PrefillClient(self._channels.get(worker))

    def give_back(self, worker: str, handles: tuple[KvHandle, ...], attempt: int) -> None:
        """Returns leased pages to `worker`: no attempt up to this one will pull them. If the call fails, the
        lease of the pages expires instead.
        """
        for handle in handles:
            task = asyncio.create_task(self._give_back(worker, handle, attempt), name=f"give back {worker}")
            self._returns.add(task)
            task.add_done_callback(self._returns.discard)

    async def _give_back(self, worker: str, handle: KvHandle, attempt: int) -> None:
        try:
            await TransferClient(self._channels.get(worker), worker).give_back(handle, attempt)
        except EyasError as error:
            _log.info("worker %s keeps pages until their lease ends: %s", worker, error)

    async def flush(self, wait_s: float) -> dict[str, int]:
        """See `GenerationBackend.flush`."""

        async def flush(worker: str) -> int:
            return await InfoClient(self._channels.get(worker)).flush_cache(wait_s)

        return (await self._targets.ask(self._targets.names(), flush)).whole("flushed their caches")

    async def control(self, command: ControlCommand) -> dict[str, ControlOutcome]:
        """Has every target worker carry out the command, then reads their new states; returns the outcomes.

        Raises the error of a worker that failed. The others have carried out the command then, but released
        memory is resumed: a cluster in which only some workers sleep serves nothing.
        """

        async def carry_out(worker: str) -> ControlOutcome:
            return await ControlClient(self._channels.get(worker)).control(command)

        outcomes = await self._targets.ask(self._targets.names(), carry_out)
        if outcomes.failed and isinstance(command, ReleaseMemory):
            await self._resume(outcomes.answers)
        await self._targets.refresh()
        return outcomes.whole("did as they were asked")

    async def _resume(self, released: dict[str, ControlOutcome]) -> None:
        """Has each of these workers resume the memory that it has just released. A worker that fails still
        sleeps, as its state reports.
        """

        async def resume(worker: str) -> ControlOutcome:
            tags = tuple(move.tag for move in released[worker].moved)
            return await ControlClient(self._channels.get(worker)).control(ResumeMemory(tags))

        await self._targets.ask((worker for worker, outcome in released.items() if outcome.moved), resume)

    def occupy(self, worker: str, part: UnderWay) -> LegLoad:
        """Adds a starting leg to the load of `worker`, so that the next request is routed by the new load.

        The caller closes the returned load at the end of the leg.
        """
        return LegLoad(partial(self._ledger.add, worker), part)

    def _connected(self, worker: str) -> bool:
        return worker in self._sessions and self._sessions[worker].connected

    def _is_ours(self, info: WorkerInfo) -> bool:
        if not info.runs_target:
            return True
        self._fingerprint = self._fingerprint or info.fingerprint
        self._arithmetic = self._arithmetic or info.arithmetic
        difference = self._difference(info)
        if difference and (info.worker, difference) not in self._reported:
            self._reported.add((info.worker, difference))
            _log.warning("worker %s %s: it gets no requests", info.worker, difference)
        return not difference

    def _difference(self, info: WorkerInfo) -> str:
        """How a target worker differs from those that get requests; empty if it does not."""
        if info.fingerprint != self._fingerprint:
            return f"serves another model ({info.model})"
        if self._tokenizer and info.tokenizer and info.tokenizer != self._tokenizer:
            return "has another tokenizer than the gateway (--tokenizer of either, or the model's folder)"
        if info.arithmetic != self._arithmetic:
            return f"computes by {info.arithmetic} arithmetic, and others by {self._arithmetic}"
        if Role.DECODE not in info.roles:
            return ""
        if self._synthetic is None:
            self._synthetic = info.synthetic
        if info.synthetic == self._synthetic:
            return ""
        return "accepts drafts by chance" if info.synthetic else "accepts no drafts by chance, as others do"

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_S)
            self._open_sessions()
            self.adapters.follow()
            self.weights.follow()
            for info in self.workers():
                self._ledger.at_report(info)  # records the load at each new report
            await self._retire(time.monotonic())

    def _open_sessions(self) -> None:
        self._watch.follow([info.worker for info in self.workers() if info.runs_target])
        for info in self.workers():
            if Role.DECODE in info.roles and info.worker not in self._sessions:
                session = WorkerSession(
                    DecodeSessionClient(self._channels.get(info.worker), info.worker), info.worker
                )
                self._sessions[info.worker] = session
                session.start()

    async def _retire(self, now: float) -> None:
        """Closes the channels of workers that the registry has not listed for `RETIRE_S`."""
        known = {info.worker for info in self._registry.workers()}
        for worker in list(self._channels):
            in_use = worker in known or self._connected(worker) or self._ledger.now(worker).total > 0
            if in_use or worker not in self._known_at:
                self._known_at[worker] = now
            elif now - self._known_at[worker] > RETIRE_S:
                del self._known_at[worker]
                self._ledger.forget(worker)
                self._breakers.forget(worker)
                self.adapters.forget(worker)
                self.weights.forget(worker)
                if session := self._sessions.pop(worker, None):
                    await session.aclose()
                await self._channels.drop(worker)


class WorkerSearch:
    """Searches for the workers of one request.

    `turn` waits until the request is scheduled and returns whether it had to wait. `pause` waits between two
    tries; `continues` returns whether the request still needs a worker.

    `lacks`: why the search has no result yet, as half a sentence; empty after a success.
    """

    def __init__(
        self,
        cluster: Cluster,
        prefix: PromptPages,
        turn: Callable[[], Awaitable[bool]],
        pause: Callable[[], Awaitable[None]],
        continues: Callable[[], bool],
    ) -> None:
        self._cluster = cluster
        self._prefix = prefix
        self._turn = turn
        self._pause = pause
        self._continues = continues
        self._clock = asyncio.get_running_loop().time
        self.lacks = ""

    async def find(self, choose: Callable[[Sequence[RouterCandidate]], Choice | None]) -> Choice | None:
        """Returns the choice of `choose` when the request is scheduled; None if the request has ended.

        Raises Unavailable after `PATIENCE_S` in which no suitable worker served or was expected: until then a
        connection may be reopened. If the workers that could serve sleep, it is raised immediately: they may
        never wake. Raises ModelNotFound if the request's adapter is unloaded.
        """
        choice = await self._wait_for(choose)
        if choice is not None and await self._turn():
            choice = await self._wait_for(choose)  # the worker may have been lost during the wait
        return choice

    async def _wait_for(self, choose: Callable[[Sequence[RouterCandidate]], Choice | None]) -> Choice | None:
        expected_at = self._clock()
        while self._continues():
            workers = self._cluster.candidates(self._prefix)
            if (choice := choose(workers)) is not None:
                self.lacks = ""
                return choice
            if sleep := router.asleep(workers):
                raise Unavailable(sleep)
            self._cluster.check_adapter(self._prefix)
            self.lacks = self._cluster.missing(workers)
            if choose([*workers, *self._cluster.returning(self._prefix)]) is not None:
                expected_at = self._clock()
            elif self._clock() - expected_at >= PATIENCE_S:
                raise Unavailable(f"no worker can serve the request: {self.lacks}")
            await self._pause()
        return None
