"""A gateway with both of its fronts before real workers on a tiny model, all in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry

from eyas.common.cluster.discovery import registry
from eyas.common.cluster.listening import free_ports
from eyas.common.config import AdapterConfig, EngineConfig, GatewayConfig
from eyas.common.types import Role
from gateway.backends.generate import ClusterBackend
from gateway.grpc.front import GrpcFront
from gateway.http.front import create_app
from gateway.observe.metrics import GatewayMetrics
from gateway.routing.cluster import Cluster
from gateway.routing.prefix_caches import PromptPages
from tests.rpc.real_worker import RealWorker
from tests.rpc.scripted_backend import nano_tokenizer


@dataclass
class RealCluster:
    """`http`: its HTTP front; `grpc`: the address of its gRPC front."""

    workers: list[RealWorker]
    cluster: Cluster
    http: httpx.AsyncClient
    grpc: str


@contextlib.asynccontextmanager
async def real_cluster(
    config: EngineConfig,
    folder: Path,
    roles: Sequence[tuple[Role, ...]],
    gateway: GatewayConfig | None = None,
    metrics: GatewayMetrics | None = None,
    lora_dir: Path | None = None,
) -> AsyncIterator[RealCluster]:
    """One worker per item of `roles`; pools lie in `folder`. `lora_dir`: where callers may load adapters."""
    ports = free_ports()
    numbers = [next(ports) for _ in roles]
    known = "static:" + ",".join(f"127.0.0.1:{port}" for port in numbers)
    config = EngineConfig(**{**vars(config), "pool_dir": str(folder)})
    gateway, metrics = gateway or GatewayConfig(grpc_port=0), metrics or GatewayMetrics(CollectorRegistry())
    adapters = AdapterConfig() if lora_dir is None else AdapterConfig(dirs=(str(lora_dir),))
    async with contextlib.AsyncExitStack() as owned:
        workers = []
        for own, port in zip(roles, numbers, strict=True):
            engine = EngineConfig(**{**vars(config), "roles": own})
            workers.append(await RealWorker(engine, known, port, adapters=adapters).start())
            owned.push_async_callback(workers[-1].stop)
        cluster = Cluster(registry(known))
        await cluster.start()
        owned.push_async_callback(cluster.aclose)
        decodes = [w.address for w, own in zip(workers, roles, strict=True) if Role.DECODE in own]
        async with asyncio.timeout(30):
            while {w.worker for w in cluster.workers() if w.serving} != {w.address for w in workers}:
                await asyncio.sleep(0.02)
            while sum(worker.connected for worker in cluster.candidates()) != len(decodes):
                await asyncio.sleep(0.02)
        backend, tokenizer = ClusterBackend(cluster), nano_tokenizer()
        front = GrpcFront(gateway, backend, tokenizer, metrics)
        await front.start()
        owned.push_async_callback(front.aclose)
        transport = httpx.ASGITransport(create_app(gateway, backend, tokenizer, metrics))
        http = await owned.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=20)
        )
        yield RealCluster(workers, cluster, http, f"127.0.0.1:{front.port}")


BOTH = (Role.PREFILL, Role.DECODE)
TURN = {"model": "eyas-nano", "max_tokens": 4, "ignore_eos": True, "temperature": 0, "return_token_ids": True}


@contextlib.asynccontextmanager
async def another_gateway(cluster: RealCluster) -> AsyncIterator[Cluster]:
    other = Cluster(registry("static:" + ",".join(w.address for w in cluster.workers)))
    await other.start()
    try:
        yield other
    finally:
        await other.aclose()


def cached(cluster: Cluster, prompt: list[int]) -> dict[str, int]:
    return {c.info.worker: c.cached for c in cluster.candidates(PromptPages(prompt))}


SPLIT = ((Role.PREFILL,), (Role.DECODE,))
