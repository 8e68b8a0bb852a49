"""The front half of a worker: gRPC server, streams, health and metrics. Its engine is behind a link.

It selects the servicers for the worker's roles, and monitors the progress of the engine. It runs no model,
owns no pages, and never imports torch.

Both a pulse within a step and the end of a step are progress, so a long step alone is no fault. Time without
progress has two limits. After the first, the engine is late: the worker refuses new requests, and its current
ones wait. After the second, several times as long, the engine is stalled: the streams end, and gateways retry
their requests on another worker.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from decode_svc import drafts
from decode_svc import servicer as decode
from draft_svc import servicer as draft
from eyas.common.cluster.listening import listen
from eyas.common.config import WorkerConfig
from eyas.common.errors import EyasError, Unavailable
from eyas.common.metrics import ModelName, WorkerMetrics
from eyas.common.page_names import CachedPages, CacheNews, PageShape
from eyas.common.security.tls import service_tls
from eyas.common.types import Role, WorkerInfo
from eyas.common.wire import control_service, info, rpc
from eyas.common.wire.message import WireFailure
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import (
    CacheUpdate,
    Command,
    DrainEngine,
    EngineAlive,
    EngineLoad,
    EngineReady,
    EngineStopped,
    ShutdownEngine,
    StepReply,
)
from eyas.worker.adapters import WorkerAdapters
from eyas.worker.engine_calls import control, flush
from eyas.worker.kv_events import KvEventPublisher
from eyas.worker.kv_puller import KvPuller
from eyas.worker.link import FrontLink
from eyas.worker.membership import ClusterMembership
from eyas.worker.scrape import MetricsServer
from prefill_svc import servicer as prefill
from prefill_svc import transfer

TICK_S = 0.5
FOLLOW_S = 0.5
STOP_GRACE_S = 1.0
_log = logging.getLogger("eyas.front")


MIN_SILENCE_S = 3.0
STEPS_OF_SILENCE = 4.0
STALL = 4.0  # the second limit, as a multiple of the first


class WorkerFront:
    """The front of one worker.

    `start` listens (NOT_SERVING); `run` relays until the engine exits; `drain` has the engine exit when all
    accepted requests have ended; `stop` ends all streams. `ready` resolves to the engine's description once
    it is loaded.
    """

    def __init__(self, config: WorkerConfig, link: FrontLink) -> None:
        self._config = config
        self._link = link
        self._engine = EngineClient(self._send)
        self._tls = service_tls(config.tls_dir)
        dial = rpc.dialer(self._tls)
        self._membership = ClusterMembership(config, self.describe, dial)
        self._pulls = KvPuller(self._engine, self._membership.find, dial)
        self._drafts = drafts.DraftStreams(self._engine, dial)
        self._adapters: WorkerAdapters | None = None
        if config.engine.max_loras and not config.engine.only_drafts:
            self._adapters = WorkerAdapters(self._engine, config.adapters)
        self._beginning: asyncio.Task[None] | None = None  # loads the adapters of the command line
        figures, self._registry = CollectorRegistry(), CollectorRegistry()
        self._metrics = WorkerMetrics(figures)
        self._registry.register(ModelName(figures, lambda: self.describe().model))
        self._liveness = EngineLiveness()
        self._cached: CachedPages | None = None  # set by the first cached page
        self._events = None if config.events is None else KvEventPublisher(config.events)
        self._load = EngineLoad(progress=0, pending=False, running=0, waiting=0, pages_used=0)
        self._open = False  # whether streams are served
        self._serving = False  # whether new requests are accepted too
        self._draining = False
        self._lagging = False  # past the first limit: no new request is accepted
        self._stalled = False  # past the second limit: no stream is served
        self._leaving = False
        self.ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self._stopped: asyncio.Future[EngineStopped] = asyncio.get_running_loop().create_future()
        for kind, handler in (
            (EngineReady, self._on_ready),
            (EngineLoad, self._on_load),
            (EngineAlive, lambda _: self._liveness.beat(time.monotonic())),
            (CacheUpdate, self._on_cached),
            (EngineStopped, self._on_stopped),
            (StepReply, lambda step: self._metrics.step(step.entries)),
        ):
            self._engine.on(kind, handler)

    # --- life -------------------------------------------------------------------------------------------

    async def start(self) -> str:
        """Binds both ports and listens; returns the worker's address. Raises ConfigError for a taken port."""
        config, host = self._config, self._config.host
        listen(host, config.port, "port").close()  # its errors say more than those of gRPC
        self._server = rpc.server()
        services = self._add_services()
        self._health = rpc.HealthService(self._server, services)
        await self._health.set(False)
        credentials = None if self._tls is None else self._tls.server
        self._address = config.reached_at(rpc.bind(self._server, host, config.port, credentials))
        self._scrape = MetricsServer(host, config.metrics_port, self._registry)
        self.metrics_port = self._scrape.server_port
        await self._server.start()
        await self._membership.start()
        return self._address

    async def run(self) -> None:
        """Relays until the engine exits. Raises the engine's error if it failed."""
        async with asyncio.TaskGroup() as tasks:
            parts = [self._relay, self._tick, self._follow]
            if self._events is not None:
                parts.append(self._events.serve)
            relays = [tasks.create_task(part()) for part in parts]
            stopped = await self._stopped
            for relay in relays:
                relay.cancel()
        if stopped.failure is not None:
            raise stopped.failure.error()

    async def drain(self) -> None:
        """NOT_SERVING: refuses new requests with UNAVAILABLE. `run` ends when the accepted ones have
        ended.
        """
        self._draining = True
        self._send([DrainEngine()])
        await self._refresh()

    async def stop(self) -> None:
        """NOT_SERVING: ends all streams with UNAVAILABLE, and sends `ShutdownEngine`."""
        self._leaving = True
        if self._beginning is not None:
            self._beginning.cancel()
        if self._adapters is not None:
            self._adapters.close()
        await self._refresh()
        self._send([ShutdownEngine()])
        await self._membership.close()
        await asyncio.gather(self._server.stop(STOP_GRACE_S), asyncio.to_thread(self._scrape.shutdown))
        await self._drafts.close()
        await self._pulls.close()
        self._scrape.server_close()
        if self._events is not None:
            self._events.close()

    def _add_services(self) -> list[str]:
        roles = self._config.engine.roles
        services: list[tuple[str, Any]] = [
            (
                info.SERVICE,
                info.InfoServicer(
                    self.describe, self._pulls.probes.probe, self._flush, self._cache_updates, self._adapters
                ),
            )
        ]
        if not self._config.engine.only_drafts:
            calls = control_service.ControlServicer(partial(control, self._engine))
            services.append((control_service.SERVICE, calls))
        if Role.PREFILL in roles:
            services.append((prefill.SERVICE, prefill.PrefillServicer(self._engine)))
            services.append((transfer.SERVICE, transfer.TransferServicer(self._engine)))
        if Role.DECODE in roles:
            services.append((decode.SERVICE, decode.DecodeServicer(self._engine, self.describe)))
        if self._config.engine.only_drafts:  # an engine with other roles drafts for itself only
            services.append((draft.SERVICE, draft.DraftServicer(self._engine)))
        for _, service in services:
            service.register(self._server)
        return [name for name, _ in services]

    # --- relay ------------------------------------------------------------------------------------------

    def describe(self) -> WorkerInfo:
        """The description that others read. Until the engine is loaded: only its roles, and `starting`."""
        if not self._engine.is_loaded:
            return WorkerInfo(
                worker=self._address,
                roles=self._config.engine.roles,
                epoch=0,
                model="",
                fingerprint="",
                draft_fingerprint="",
                context_length=0,
                vocab_size=0,
                pages_total=0,
                serving=False,
                starting=True,
            )
        ready = self._engine.ready
        return WorkerInfo(
            worker=self._address,
            roles=self._config.engine.roles,
            epoch=ready.epoch,
            model=ready.model,
            fingerprint=ready.fingerprint,
            draft_fingerprint=ready.draft_fingerprint,
            context_length=ready.context_length,
            vocab_size=ready.vocab_size,
            pages_total=ready.pages_total,
            pages_used=self._load.pages_used,
            running=self._load.running,
            waiting=self._load.waiting,
            serving=self._serving,
            stalled=self._lagging and not (self._draining or self._leaving),
            synthetic=ready.synthetic,
            stays=not ready.pools,
            backlog=self._load.backlog,
            rates=ready.rates,
            arithmetic=ready.arithmetic,
            tokenizer=ready.tokenizer,
            trouble=self._load.host.trouble,
            paused=self._load.paused,
            released=self._load.released,
            adapters=None if self._adapters is None else self._adapters.roster,
            adapter_slots=self._load.adapters.slots,
            weights=self._load.weights,
        )

    def _send(self, commands: Sequence[Command]) -> None:
        self._liveness.sent(len(commands), time.monotonic())
        self._link.send(commands)

    async def _relay(self) -> None:
        while True:
            self._engine.dispatch(await self._link.recv())
            await self._refresh()

    async def _tick(self) -> None:
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(TICK_S)
            self._liveness.missed(time.monotonic() - slept_at - TICK_S)  # as of a suspended machine
            await self._refresh()
            self._update_metrics()

    async def _follow(self) -> None:
        """Updates the streams to draft workers and the channels to owners of pages as members change."""
        while True:
            self._drafts.follow(self._membership.drafters())
            await self._pulls.follow(self._membership.addresses())
            await asyncio.sleep(FOLLOW_S)

    @property
    def stalled(self) -> bool:
        """Whether the engine has work, but made no progress until the second limit, so its streams ended."""
        return self._stalled

    async def _refresh(self) -> None:
        """Updates health and admission from the engine's state: the only place that changes them."""
        now = time.monotonic()
        self._stalled = self._liveness.stalled(now)
        self._set_open(self._engine.is_loaded and not self._stalled and not self._leaving)
        self._set_lagging(self._liveness.is_lagging(now))
        asleep = self._load.released and not self._load.paused
        closed = self._load.weights.closed
        serving = self._open and not (self._lagging or self._draining or asleep or closed)
        if serving != self._serving:
            self._serving = serving
            self._metrics.serving.set(serving)
            if self._open and (self._draining or asleep):
                _log.info("not serving: it %s", "is draining" if self._draining else "sleeps")
            await self._health.set(serving)

    def _set_open(self, open: bool) -> None:
        """Accepts streams, or ends them."""
        if open == self._open:
            return
        self._open = open
        if open:
            self._engine.accept()
            return
        silence = f"its engine made no progress for {self._liveness.stall_s:.1f} s"
        reason = silence if self._stalled else "it is leaving"
        _log.log(logging.WARNING if self._stalled else logging.INFO, "not serving: %s", reason)
        self._engine.fail(Unavailable(f"worker {self._address} stopped serving: {reason}"))

    def _set_lagging(self, lagging: bool) -> None:
        """Refuses new requests while the engine is late; accepted ones stay."""
        if lagging == self._lagging:
            return
        self._lagging = lagging
        silence = f"its engine made no progress for {self._liveness.limit_s:.1f} s"
        if lagging:
            _log.warning("late: %s; nothing new is accepted meanwhile", silence)
        elif self._open:
            _log.info("its engine goes on")
        self._engine.defer(Unavailable(f"worker {self._address} is late: {silence}") if lagging else None)

    # --- events -----------------------------------------------------------------------------------------

    def _on_ready(self, ready: EngineReady) -> None:
        self._liveness.loaded(ready.slowest_step_s, time.monotonic())
        if self._adapters is None:
            self._begin(ready)
        else:
            self._beginning = asyncio.create_task(self._begin_with(self._adapters, ready), name="adapters")

    async def _begin_with(self, adapters: WorkerAdapters, ready: EngineReady) -> None:
        """Serves once the adapters of the command line are loaded; ends the worker if one cannot be
        loaded.
        """
        try:
            await adapters.begin()
        except EyasError as error:
            self._on_stopped(EngineStopped(WireFailure.of(error)))
        else:
            self._begin(ready)

    def _begin(self, ready: EngineReady) -> None:
        self._engine.ready = ready
        self._metrics.pages.set(ready.pages_total)
        self._metrics.synthetic.set(ready.synthetic)
        if self._events is not None:
            self._events.begin(f"kv@{self._address}@{ready.model}")
        self.ready.set_result(ready)

    def _on_cached(self, update: CacheUpdate) -> None:
        if self._cached is None:
            shape = PageShape(update.page_size, update.lookahead)
            self._cached = CachedPages(self._engine.ready.epoch, shape)
        self._cached.change(update.added, update.dropped, update.host_added, update.host_dropped)
        if self._events is not None:
            self._events.publish(update)

    def _cache_updates(self, number: int | None) -> CacheNews | None:
        """The changes of the cache since update `number`; None before the first cached page.

        Raises Unavailable when the worker stops, which ends the streams of its followers.
        """
        if self._leaving:
            raise Unavailable("the worker is leaving")
        return None if self._cached is None else self._cached.since(number)

    async def _flush(self, wait_s: float) -> int:
        """Empties the prefix cache, which an engine that only drafts does not have."""
        return 0 if self._config.engine.only_drafts else await flush(self._engine, wait_s)

    def _on_load(self, load: EngineLoad) -> None:
        self._load = load
        self._liveness.saw(load, time.monotonic())

    def _update_metrics(self) -> None:
        """Copies the load to the metrics. Once per tick is enough: the page is read rarely."""
        load = self._load
        self._metrics.paused.set(load.paused)
        self._metrics.asleep.set(bool(load.released))
        self._metrics.running.set(load.running)
        self._metrics.waiting.set(load.waiting)
        self._metrics.queue_age.set(load.oldest_waiting_s)
        self._metrics.step_seconds.show(load.step_seconds, load.step_seconds_total)
        self._metrics.step_sequences.show(load.step_sequences, load.step_sequences_total)
        self._metrics.pages_used.set(load.pages_used)
        self._metrics.totals(
            prompt_tokens=load.prompt_tokens,
            cached_tokens=load.cached_tokens,
            preemptions=load.preemptions,
            logits_not_finite=load.logits_not_finite,
            pulls_failed=load.pulls_failed,
            nodes_verified=load.nodes_verified,
            drafts_late=load.drafts_late,
            host_tokens=load.host.tokens,
            host_bytes_out=load.host.bytes_out,
            host_bytes_in=load.host.bytes_in,
            store_tokens=load.host.store_tokens,
            store_misses=load.host.store_misses,
            store_bytes_out=load.host.store_bytes_out,
            store_bytes_in=load.host.store_bytes_in,
            store_failures=load.host.store_failures,
            store_slow=load.host.store_slow,
            adapter_loads=load.adapters.loads,
            adapter_seconds=load.adapters.seconds,
            state_hits=load.states.hits,
            state_tokens=load.states.tokens,
            state_missed=load.states.missed,
        )
        self._metrics.adapter_slots_used.set(len(load.adapters.slots))
        self._metrics.adapter_waiting.set(load.adapters.waiting)
        self._metrics.adapter_bytes.set(load.adapters.host_bytes)
        self._metrics.state_slots.set(load.states.slots)
        self._metrics.state_slots_used.set(load.states.used)
        self._metrics.states_cached.set(load.states.kept)
        self._metrics.host_pages.set(load.host.pages)
        self._metrics.leases.set(load.leases)
        self._metrics.weights_generation.set(load.weights.generation)
        self._metrics.weights_pause.set(load.weights.seconds)
        for path, moved in load.moved.items():
            self._metrics.moved(path, moved.pulls, moved.bytes, moved.seconds)
        for path, refused in load.ways_refused.items():
            self._metrics.ways_refused(path, refused)
        for path, commits in load.drafts_sent.items():
            self._metrics.drafts_sent(path, commits)

    def _on_stopped(self, stopped: EngineStopped) -> None:
        self._leaving = True
        if not self._stopped.done():
            self._stopped.set_result(stopped)


class EngineLiveness:
    """Decides whether the engine is late or stalled. Callers pass the current time, in monotonic seconds.

    An engine without work is never late. It has work if its last `EngineLoad` has `pending` set, or counts
    fewer commands than were sent: it may have been sent before a command arrived. No progress is expected
    before `loaded` is called.
    """

    def __init__(self) -> None:
        self.limit_s = math.inf
        self._progress = -1
        self._pending = False
        self._sent = 0  # commands sent so far
        self._received = 0  # commands that the engine has counted
        self._since = 0.0  # when the engine last made progress or had no work

    @property
    def stall_s(self) -> float:
        """The second limit: after this time without progress, the engine is stalled."""
        return STALL * self.limit_s

    def loaded(self, slowest_step_s: float, now: float) -> None:
        """Starts the limits: the engine may take a few of its slowest steps without a report."""
        self.limit_s = max(MIN_SILENCE_S, STEPS_OF_SILENCE * slowest_step_s)
        self._since = now

    def sent(self, commands: int, now: float) -> None:
        """Records that commands were sent: from now on the engine must make progress."""
        if not self._has_work:
            self._since = now
        self._sent += commands

    def saw(self, load: EngineLoad, now: float) -> None:
        """Records an `EngineLoad`."""
        progressed = load.progress != self._progress
        self._progress, self._pending, self._received = load.progress, load.pending, load.heard
        if progressed or not self._has_work:
            self._since = now

    def beat(self, now: float) -> None:
        """Records a pulse."""
        self._since = now

    def missed(self, seconds: float) -> None:
        """Excludes a time in which the front itself did not run."""
        self._since += seconds

    def is_lagging(self, now: float) -> bool:
        """Whether the engine has had work without progress for longer than `limit_s`."""
        return self._has_work and now - self._since > self.limit_s

    def stalled(self, now: float) -> bool:
        """Whether the engine has had work without progress for longer than `stall_s`."""
        return self._has_work and now - self._since > self.stall_s

    @property
    def _has_work(self) -> bool:
        return self._pending or self._received < self._sent
