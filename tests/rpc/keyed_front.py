"""A gRPC front that demands a key, and a channel to it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc
from prometheus_client import CollectorRegistry
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.common.config import GatewayConfig
from gateway.grpc.front import GrpcFront
from gateway.observe.metrics import GatewayMetrics

CONFIG = GatewayConfig(grpc_port=0, max_body_bytes=4096, api_keys=("sesame", "open"))
KEY = (("authorization", "Bearer open"),)
GENERATE = "/eyas.v1.Eyas/Generate"
SOON_S = 20.0


@contextlib.asynccontextmanager
async def served(config: GatewayConfig = CONFIG) -> AsyncIterator[tuple[grpc.aio.Channel, ScriptedBackend]]:
    """A channel to a running gRPC front, and the backend behind it."""
    backend = ScriptedBackend(nano_tokenizer())
    front = GrpcFront(config, backend, backend.tokenizer, GatewayMetrics(CollectorRegistry()))
    await front.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
            yield channel, backend
    finally:
        await front.aclose()
