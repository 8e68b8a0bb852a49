"""A cluster on one machine: starts its processes, restarts them when they die, and ends them all.

Ready means that every worker's gRPC health says SERVING and the gateway's /health answers 200. `plan`
describes the processes, and `child` runs each one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType

from eyas.cluster.checks import check_engine, check_gateway, check_room
from eyas.cluster.child import ChildProcess, LogLine, keep
from eyas.cluster.plan import HostResources, gateway_argv, plan, worker_argv
from eyas.common.cluster.listening import free_ports, listen
from eyas.common.cluster.names import join
from eyas.common.config import GatewayConfig, ServeConfig
from eyas.common.errors import ConfigError, DeadlineExceeded
from eyas.common.logging import message_in
from eyas.common.machine import gpus
from eyas.common.machine.folders import new_pool_folder
from eyas.common.machine.memory import memory
from eyas.common.machine.processes import python_module
from eyas.common.security import api_keys, secret_urls
from gateway.limits.quotas import read_limits
from gateway.text.sampling_defaults import chosen_defaults

START_S = 180.0  # from the start of the first process until the gateway is ready
POLL_S = 0.1
GATEWAY_GRACE_S = 7.0  # after its drain time
WORKER_GRACE_S = 10.0

GATEWAY = "gateway"
Progress = Callable[[list[str], float], None]  # (processes that are not ready yet, seconds since the start)


class LocalCluster:
    """`async with LocalCluster(config, log) as cluster:` starts a cluster, waits until it is ready, and ends
    it.

    Raises ConfigError for a configuration that cannot work (before any process starts, or when a process
    refuses it) and DeadlineExceeded if the cluster is not ready in time.
    """

    def __init__(self, config: ServeConfig, log: LogLine, progress: Progress | None = None) -> None:
        check_engine(config.engine)
        check_gateway(config.gateway)
        chosen_defaults(config.gateway)
        _check_certificates(config.gateway)
        read_limits(config.gateway.key_limits)
        with listen(config.gateway.host, config.gateway.port, "port"):
            listen(config.gateway.host, config.gateway.grpc_port, "grpc-port").close()
        self._log = log
        self._progress = progress
        self._pool_dir = config.engine.pool_dir
        bytes_of_gpus = () if config.engine.device == "cpu" else gpus.memory()
        machine = HostResources(len(os.sched_getaffinity(0)), bytes_of_gpus, memory())
        self._plan = plan(config, free_ports(), machine)
        engines = {name: worker.engine for name, worker in self._plan.workers.items()}
        check_room(engines, machine.gpus, machine.memory)
        self._children: dict[str, ChildProcess] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False
        self.start_s = 0.0  # seconds that the start took

    @property
    def url(self) -> str:
        """The gateway's HTTP address, as clients on this machine reach it."""
        scheme = "http" if self._plan.gateway.certificate is None else "https"
        return f"{scheme}://{join(self._reachable, self._plan.gateway.port)}"

    @property
    def grpc_address(self) -> str:
        """The gateway's gRPC address, as clients on this machine reach it."""
        return join(self._reachable, self._plan.gateway.grpc_port)

    @property
    def model(self) -> str:
        """The model's name in the API."""
        return self._plan.gateway.served_model

    @property
    def drain_s(self) -> float:
        """Seconds that open requests have to finish when the cluster stops."""
        return self._plan.gateway.drain_s

    @property
    def pids(self) -> dict[str, int]:
        """Name -> process id, for the processes that run now."""
        return {name: child.pid for name, child in self._children.items() if child.pid and child.running}

    @property
    def addresses(self) -> dict[str, str]:
        """Name -> address of each worker; a restart does not change it."""
        return {name: worker.address for name, worker in self._plan.workers.items()}

    @property
    def pool_folder(self) -> Path:
        """The folder of all KV pools; it exists while the cluster runs."""
        return self._pools.path

    async def __aenter__(self) -> LocalCluster:
        self._pools = new_pool_folder(self._pool_dir)
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    @property
    def stopping(self) -> bool:
        """Whether the cluster has begun to stop, for any reason."""
        return self._stopping

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    def kill(self) -> None:
        """Ends every process now."""
        for child in self._children.values():
            child.kill()

    # --- start -----------------------------------------------------------------------------------------

    async def _start(self) -> None:
        try:
            await self._until_ready()
        except asyncio.CancelledError:
            if any((child.returncode or 0) > 0 for child in self._children.values()):
                self._refuse_early_death()  # a process had failed before the cancellation
            raise
        self._keepers = [asyncio.create_task(keep(child, self._log)) for child in self._children.values()]

    async def _until_ready(self) -> None:
        began = time.monotonic()
        for name in (*self._plan.workers, GATEWAY):
            command = python_module("eyas.cli", *self._argv(name))
            child = ChildProcess(name, command, self._log, self._environment(name))
            self._children[name] = child
            child.start()
        from eyas.cluster.probe import ClusterProbe

        async with ClusterProbe(self.addresses, self.url, self._plan.gateway.tls_dir) as probe:
            while not await probe.serving():
                self._refuse_early_death()
                waited = time.monotonic() - began
                if waited > START_S:
                    raise DeadlineExceeded(f"not ready after {START_S:g} s: {self._last_words()}")
                if self._progress:
                    self._progress([*probe.workers, GATEWAY], waited)
                await asyncio.sleep(POLL_S)
        self.start_s = time.monotonic() - began

    def _argv(self, name: str) -> tuple[str, ...]:
        if name == GATEWAY:
            return gateway_argv(self._plan.gateway)
        worker = self._plan.workers[name]
        engine = dataclasses.replace(worker.engine, pool_dir=str(self._pools.path))
        return worker_argv(dataclasses.replace(worker, engine=engine))

    def _environment(self, name: str) -> dict[str, str]:
        """The environment of a process, with only the secrets that it needs."""
        if name == GATEWAY:
            return secret_urls.environment(api_keys.environment(self._plan.gateway.api_keys), {})
        store = self._plan.workers[name].engine.kv_store
        return secret_urls.environment(api_keys.environment(()), {"kv-store": store})

    def _refuse_early_death(self) -> None:
        for child in self._children.values():
            if child.returncode is not None:
                child.kill()  # ends its log, so that its last line is complete
                reason = (
                    message_in(child.tail[-1]).removeprefix("eyas: ") if child.tail else "it said nothing"
                )
                raise ConfigError(f"{child.name} ended with code {child.returncode} at start: {reason}")

    def _last_words(self) -> str:
        return (
            "; ".join(f"{c.name}: {message_in(c.tail[-1])}" for c in self._children.values() if c.tail)
            or "no output"
        )

    @property
    def _reachable(self) -> str:
        host = self._plan.gateway.host
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)

    # --- stop ------------------------------------------------------------------------------------------

    async def _stop(self) -> None:
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        children = dict(self._children)
        if gateway := children.pop(GATEWAY, None):
            await gateway.stop(self.drain_s + GATEWAY_GRACE_S)
        # Without the gateway there are no requests: SIGHUP makes the workers exit without draining.
        await asyncio.gather(*(worker.stop(WORKER_GRACE_S, signal.SIGHUP) for worker in children.values()))
        self._pools.leave()


def _check_certificates(gateway: GatewayConfig) -> None:
    """Raises ConfigError for certificates that cannot be used. Their libraries are imported only if
    needed.
    """
    if gateway.certificate is None and gateway.tls_dir is None:
        return
    from eyas.common.security.tls import caller_context, service_tls

    service_tls(gateway.tls_dir)
    if gateway.certificate is not None:
        caller_context(gateway.certificate)


Work = Callable[[LocalCluster], Awaitable[int]]


def run_cluster(cluster: LocalCluster, work: Work, stopping: Callable[[], None]) -> int:
    """Starts a cluster, runs `work` on it, stops it; returns what `work` returns.

    The first Ctrl-C, SIGTERM or SIGHUP calls `stopping`, stops the cluster in order and raises
    KeyboardInterrupt. A signal while the cluster stops kills all processes; the outcome is unchanged: an
    error of the start, or the result of `work`.
    """
    return asyncio.run(_run_cluster(cluster, work, stopping))


async def _run_cluster(cluster: LocalCluster, work: Work, stopping: Callable[[], None]) -> int:
    async def start_and_work() -> int:
        async with cluster:
            return await work(cluster)

    task = asyncio.create_task(start_and_work())
    signalled = False

    def on_signal() -> None:
        nonlocal signalled
        if signalled or cluster.stopping:
            cluster.kill()
        elif not task.done():
            signalled = True
            stopping()
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    try:
        return await task
    except asyncio.CancelledError:
        if signalled:
            raise KeyboardInterrupt from None
        raise
