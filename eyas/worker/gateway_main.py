"""The gateway process: everything of a gateway put together on one event loop, and taken apart again.

HTTP (uvicorn) and gRPC (grpc.aio) are two fronts of one backend. It loads no torch and knows nothing of
requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from eyas.common import rpc
from eyas.common.config import GatewayConfig
from eyas.worker.ports import listen
from gateway.backend import Backend
from gateway.cluster import Cluster, Lines, registry
from gateway.generate import ClusterBackend
from gateway.http import create_app
from gateway.tokenizer import Tokenizer

GRACE_S = 3.0  # what running requests get when the gateway is asked to stop


def run_gateway(config: GatewayConfig) -> None:
    """Serves until SIGTERM or SIGINT. Raises ConfigError if a port, the registry or the tokenizer is no good."""
    uvloop.run(_run(config))


async def _run(config: GatewayConfig) -> None:
    tokenizer = Tokenizer.load(config.model)
    lines = Lines()
    cluster = Cluster(registry(config.registry, lines), lines)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        async with fronts(config, ClusterBackend(cluster), tokenizer):
            await cluster.start()
            await stop.wait()
    finally:
        await cluster.aclose()


@contextlib.asynccontextmanager
async def fronts(config: GatewayConfig, backend: Backend, tokenizer: Tokenizer) -> AsyncIterator[None]:
    """Both fronts of `backend`, listening. At the end running requests have GRACE_S to finish."""
    http = _http(config, backend, tokenizer)
    listener = listen(config.host, config.port, "port")
    grpc = rpc.server()
    rpc.bind(grpc, config.host, config.grpc_port)
    await grpc.start()
    serving = asyncio.create_task(http.serve(sockets=[listener]), name="http")
    try:
        yield
    finally:
        http.should_exit = True
        await asyncio.gather(serving, grpc.stop(GRACE_S), return_exceptions=True)


class _Http(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to this process's own handlers: uvicorn's would end it before its gRPC front."""
        yield


def _http(config: GatewayConfig, backend: Backend, tokenizer: Tokenizer) -> _Http:
    metrics = CollectorRegistry()
    ProcessCollector(registry=metrics)
    PlatformCollector(registry=metrics)
    app = create_app(config, backend, tokenizer, metrics)
    return _Http(
        uvicorn.Config(
            app,
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=int(GRACE_S),
        )
    )
