"""A gateway's canary that runs before a backend."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from prometheus_client import CollectorRegistry

from gateway.backends.base import GenerationBackend
from gateway.observe.canary import CanaryBackend, CanarySchedule
from gateway.observe.metrics import GatewayMetrics

PACE = CanarySchedule(every_s=0.3, again_s=0.1, timeout_s=0.4, busy_timeout_s=30.0)


@contextlib.asynccontextmanager
async def flying(
    backend: GenerationBackend, pace: CanarySchedule = PACE
) -> AsyncIterator[tuple[CanaryBackend, GatewayMetrics]]:
    metrics = GatewayMetrics(CollectorRegistry())
    canary = CanaryBackend(backend, metrics, pace)
    task = asyncio.create_task(canary.run())
    try:
        yield canary, metrics
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
