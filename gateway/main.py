"""The gateway process: builds all parts of a gateway on one event loop, drains and closes them.

HTTP and gRPC are two fronts of one backend. This file loads no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from eyas.common import logging as eyas_logging
from eyas.common.cluster.discovery import WorkerRegistry, registry
from eyas.common.cluster.names import is_loopback, join
from eyas.common.config import GatewayConfig
from eyas.common.errors import Unavailable
from eyas.common.logging import OutageLog
from eyas.common.machine.leave import StopSignals
from eyas.common.machine.memory import keep_all
from eyas.common.machine.processes import raise_limit
from eyas.common.security.tls import caller_context, service_tls
from eyas.common.tokenizers.source import tokenizer_digest
from eyas.common.types import GenerationRequest
from eyas.common.wire import rpc
from gateway.backends.base import (
    BackendHealth,
    GenerationBackend,
    GenerationStream,
    PassingBackend,
    WatchedStream,
)
from gateway.backends.generate import ClusterBackend
from gateway.grammars.checks import GrammarBackend, GrammarChecks
from gateway.grpc.front import GrpcFront
from gateway.http.front import create_app
from gateway.http.middleware import guarded, rooted
from gateway.http.protocol import HttpLimits
from gateway.http.server import HttpServer
from gateway.http.siblings import GatewaySiblings
from gateway.limits.adapters import AdapterLimits
from gateway.limits.fair import FairBackend
from gateway.limits.quotas import CallerQuotas, read_limits
from gateway.observe import tracing
from gateway.observe.adapters import AdapterMeter
from gateway.observe.canary import CanaryBackend
from gateway.observe.metrics import GatewayMetrics
from gateway.routing.cluster import Cluster
from gateway.routing.layouts import AutoLayout
from gateway.routing.placement import LatencyTargets
from gateway.text.sampling_defaults import chosen_defaults, with_file_names
from gateway.text.tokenizer import Tokenizer

LOOK_S = 0.5
FIRST_S = 5.0  # a cluster that starts may take this long
DRAINING = "the server is draining: it is about to stop"


async def tell_waiting(health: Callable[[], BackendHealth], registry: WorkerRegistry) -> None:
    """Logs what keeps requests or workers from being served, until it is cancelled."""
    serving, workers = OutageLog(_log, FIRST_S), OutageLog(_log, FIRST_S)
    while True:
        await asyncio.sleep(LOOK_S)
        if problem := health().problem:
            serving.failed("%s", problem)
        else:
            serving.works("requests are served")
        silent = [f"waiting for worker {worker}: {_end(why)}" for worker, why in registry.silent().items()]
        if silent:
            workers.failed("%s", "; ".join(silent))
        else:
            workers.works("all known workers answer")


def _end(reason: str) -> str:
    """The last part of gRPC's message about a failed connection, which lists all attempts first."""
    return reason.rpartition(": ")[2]


_log = logging.getLogger("eyas.gateway")


def run_gateway(config: GatewayConfig) -> None:
    """Serves until SIGTERM or SIGINT; then open requests have `drain_s` seconds to finish.

    A second signal, or SIGHUP, ends it at once. Raises ConfigError for a bad port, registry or tokenizer.
    """
    name = Path(config.member).stem if config.member else "gateway"
    eyas_logging.setup(name, config.log_format, config.log_level, reads_text=True)
    if config.member is None:
        warn_if_open(config)
    uvloop.run(_run(config))


def fitting(config: GatewayConfig, files: int) -> GatewayConfig:
    """The configuration with as many connections per front as `files` open files allow. Logs a cut."""
    # One connection over HTTP has one, one over gRPC three; each front may have as many TLS handshakes.
    each = 1 + 3 + (0 if config.certificate is None else 2)
    connections = min(config.max_connections, files // (each + 1))
    if connections < config.max_connections:
        _log.warning("only %d files may be open: at most %d connections per front", files, connections)
    return dataclasses.replace(config, max_connections=connections)


def warn_if_open(config: GatewayConfig) -> None:
    """Says in the log if everyone who reaches this machine may use what it serves."""
    if not is_loopback(config.host) and not config.api_keys and config.api_key_file is None:
        text = "it listens on %s without API keys: everyone who reaches it may use it (--api-key-file)"
        _log.warning(text, config.host)


async def _run(config: GatewayConfig) -> None:
    folder = config.texts.folder
    tokenizer = Tokenizer.load(
        folder, template=config.chat_template, trust_special_tokens=config.trust_special_tokens
    )
    config = dataclasses.replace(config, sampling=chosen_defaults(config))
    if config.sampling:
        said = ", ".join(f"{name} {value}" for name, value in with_file_names(config.sampling).items())
        _log.info("unless a request says otherwise: %s (generation_config.json, or flags)", said)
    dial = rpc.dialer(service_tls(config.tls_dir))
    workers = registry(config.registry, dial, config.registry_ca, config.cluster)
    quotas = CallerQuotas(read_limits(config.key_limits))
    cluster = Cluster(workers, dial, quotas.pace, tokenizer_digest(folder))
    grammars = GrammarChecks(folder)
    leave = StopSignals()
    tracer = tracing.tracer(config.otlp_endpoint)
    config = fitting(config, raise_limit())
    try:
        grammars.start()
        await cluster.start()
        siblings = None if config.member is None else GatewaySiblings(Path(config.member))
        metrics = GatewayMetrics(_registry(), siblings)
        metrics.tracer = tracer
        auto = None
        if config.layout == "auto":
            targets = LatencyTargets(config.ttft_target, config.tpot_target)
            auto = AutoLayout(cluster.candidates, targets, metrics.placement)
        canary = CanaryBackend(ClusterBackend(cluster, auto), metrics)
        meter = AdapterMeter(canary, metrics.adapters)
        fair = FairBackend(meter, lambda caller: quotas.limits.of(caller).weight)
        limited = AdapterLimits(fair, quotas.limits, metrics.adapters.count_limited)
        exit = DrainableBackend(GrammarBackend(limited, grammars))
        async with metrics, fronts(config, exit, tokenizer, metrics, quotas), asyncio.TaskGroup() as tasks:
            keep_all()
            looks = [tasks.create_task(canary.run()), tasks.create_task(tell_waiting(canary.health, workers))]
            if auto is not None:
                looks.append(tasks.create_task(auto.run()))
            await leave.requested.wait()
            for look in looks:
                look.cancel()
            _log.info("draining: %d open requests may finish within %g s", exit.requests, config.drain_s)
            exit.close(on_empty=leave.now.set)
            await leave.within(config.drain_s)
            exit.cut()
    finally:
        await grammars.aclose()
        await cluster.aclose()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


def _registry() -> CollectorRegistry:
    """A registry that already has the figures of the process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


@contextlib.asynccontextmanager
async def fronts(
    config: GatewayConfig,
    backend: GenerationBackend,
    tokenizer: Tokenizer,
    metrics: GatewayMetrics,
    quotas: CallerQuotas | None = None,
) -> AsyncIterator[None]:
    """Starts both fronts of `backend` and prints their addresses. At the end, answers get time to leave."""
    quotas = quotas or CallerQuotas()  # both fronts count together
    metrics.turns.ask(lambda: quotas.pace.waiting)
    grpc = GrpcFront(config, backend, tokenizer, metrics, quotas)
    config = dataclasses.replace(config, grpc_port=grpc.port)  # callers get the real one
    app = guarded(create_app(config, backend, tokenizer, metrics, quotas), config)
    app = rooted(app, config.root_path)
    limits, shared = HttpLimits(config.max_connections), config.member is not None
    tls = None if config.certificate is None else caller_context(config.certificate)
    http = HttpServer(app, config.host, config.port, limits, shared, tls)
    await grpc.start()
    await http.start()
    scheme = "http" if tls is None else "https"
    where = f"http={scheme}://{join(config.host, http.port)}/v1 grpc={join(config.host, grpc.port)}"
    eyas_logging.announce(f"gateway listening: model={config.served_model} {where}")
    try:
        yield
    finally:
        await asyncio.gather(http.aclose(), grpc.aclose())


class DrainableBackend(PassingBackend):
    """Passes everything to the backend behind it until `close`; then it refuses requests and is unhealthy."""

    def __init__(self, backend: GenerationBackend) -> None:
        super().__init__(backend)
        self._closed = False
        self._starting: set[asyncio.Timeout] = set()
        self._open: set[WatchedStream] = set()
        self._on_empty: Callable[[], None] = lambda: None

    @property
    def requests(self) -> int:
        """How many requests are open."""
        return len(self._starting) + len(self._open)

    def close(self, on_empty: Callable[[], None]) -> None:
        """Refuses requests from now on. Calls `on_empty` as soon as none is open, perhaps at once."""
        self._closed, self._on_empty = True, on_empty
        self._check_empty()

    def cut(self) -> None:
        """Ends all open requests now, with Unavailable."""
        now = asyncio.get_running_loop().time()
        for start in self._starting:
            start.reschedule(now)
        for stream in self._open:
            stream.fail(Unavailable(DRAINING))

    # --- the backend -----------------------------------------------------------------------------------

    async def start(self, request: GenerationRequest) -> GenerationStream:
        """Starts a request, unless the gateway leaves."""
        if self._closed:
            raise Unavailable(DRAINING)
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._starting.add(limit)
                stream = WatchedStream(await self._backend.start(request), self._ended)
                self._open.add(stream)
        except TimeoutError:
            if limit.expired():
                raise Unavailable(DRAINING) from None
            raise
        finally:
            self._starting.discard(limit)
            self._check_empty()
        return stream

    def health(self) -> BackendHealth:
        """Says that it leaves, if it does."""
        return BackendHealth(DRAINING) if self._closed else self._backend.health()

    def _ended(self, stream: WatchedStream) -> None:
        self._open.discard(stream)
        self._check_empty()

    def _check_empty(self) -> None:
        if self._closed and not self.requests:
            self._on_empty()
