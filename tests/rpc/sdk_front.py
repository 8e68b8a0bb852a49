"""A gRPC front over a scripted backend, and the SDK's clients of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import pytest
from prometheus_client import CollectorRegistry
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.client import (
    AsyncClient,
    Client,
)
from eyas.common.config import GatewayConfig
from gateway.grpc.front import GrpcFront
from gateway.observe.metrics import GatewayMetrics

CONFIG = GatewayConfig(grpc_port=0, max_body_bytes=4096)
CHAT = [{"role": "user", "content": "Hi"}]
T = TypeVar("T")


@contextlib.asynccontextmanager
async def served(backend: ScriptedBackend, config: GatewayConfig = CONFIG) -> AsyncIterator[str]:
    """The address of a running gRPC front."""
    front = GrpcFront(config, backend, backend.tokenizer, GatewayMetrics(CollectorRegistry()))
    await front.start()
    try:
        yield f"127.0.0.1:{front.port}"
    finally:
        await front.aclose()


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(nano_tokenizer())


@pytest.fixture
async def client(backend: ScriptedBackend) -> AsyncIterator[AsyncClient]:
    async with served(backend) as address, AsyncClient(address, retries=0) as client:
        yield client


async def in_thread(backend: ScriptedBackend, work: Callable[[Client], T]) -> T:
    async with served(backend) as address:

        def run() -> T:
            with Client(address) as client:
                return work(client)

        return await asyncio.to_thread(run)
