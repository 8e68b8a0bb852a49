"""What the gateway's HTTP front costs by itself: CPU time per request and per token.

A gateway process (`python -m eyas.bench.gateway_cost PORT GRPC_PORT`) serves a backend that answers at
once; the client asks for short and long answers and reads the process's CPU clock. The difference is the cost
per token: its entry, detokenization, stop strings, JSON, one server-sent event. Streams to workers are not
included.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator
from typing import Any

import psutil
from prometheus_client import CollectorRegistry

from eyas.bench.asking import Target
from eyas.bench.backends import COMPLETIONS, RequestTemplate
from eyas.bench.child_server import child_server
from eyas.bench.http import Server
from eyas.bench.jobs import Job
from eyas.bench.runner import Workload, run_load
from eyas.common.config import GatewayConfig
from eyas.common.errors import EyasError
from eyas.common.types import Entry, Finish, GenerationRequest, Role, WorkerInfo
from eyas.worker.gateway_main import fronts
from eyas.worker.ports import free_ports
from gateway.backend import BackendHealth, GenerationBackend, GenerationStream
from gateway.metrics import GatewayMetrics
from gateway.router import Candidate
from gateway.tokenizer import Tokenizer

REQUESTS = 400
CONCURRENCY = 8
SHORT, LONG = 1, 201  # tokens


class InstantBackend(GenerationBackend):
    """Answers every request at once with `max_tokens` times token 100, one per entry."""

    def __init__(self, vocab_size: int) -> None:
        self._worker = WorkerInfo("instant", tuple(Role), 1, "instant", "instant", "", 1 << 20, vocab_size, 1)

    async def start(self, request: GenerationRequest) -> InstantStream:
        return InstantStream(request)

    async def models(self) -> list[WorkerInfo]:
        return [self._worker]

    def links(self) -> list[Candidate]:
        return [Candidate(self._worker)]

    def health(self) -> BackendHealth:
        return BackendHealth()


class InstantStream(GenerationStream):
    """One answer of `InstantBackend`."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request

    async def __aiter__(self) -> AsyncIterator[Entry]:
        last = self._request.params.max_tokens - 1
        for index in range(last + 1):
            finish = Finish.LENGTH if index == last else None
            yield Entry(self._request.id, 1, 0, index, (100,), finish=finish)
            await asyncio.sleep(0)  # one entry per iteration of the event loop, as from a socket

    async def cancel(self, choice: int | None = None) -> None:
        pass

    def fail(self, error: EyasError) -> None:
        pass

    async def aclose(self) -> None:
        pass


async def measure_gateway() -> dict[str, Any]:
    """CPU microseconds per request and per token, as one row of figures."""
    ports = free_ports()
    port, grpc_port = next(ports), next(ports)
    server = Server(f"http://127.0.0.1:{port}")
    async with child_server("eyas.bench.gateway_cost", (port, grpc_port), server, "/health") as child:
        target = Target(server, COMPLETIONS, RequestTemplate(GatewayConfig.served_model))
        process = psutil.Process(child.pid)
        await _cpu_s(process, target, LONG)  # warm-up
        short, long = await _cpu_s(process, target, SHORT), await _cpu_s(process, target, LONG)
    per_token = (long - short) / (REQUESTS * (LONG - SHORT))
    return {
        "case": "gateway-only",
        "cpu_us_per_request": round(1e6 * (short / REQUESTS - per_token * SHORT), 1),
        "cpu_us_per_token": round(1e6 * per_token, 2),
    }


async def _cpu_s(process: psutil.Process, target: Target, tokens: int) -> float:
    """The gateway's CPU seconds for REQUESTS answers of `tokens` tokens."""
    load = Workload((Job.single(tuple(range(100, 164)), tokens),) * REQUESTS, max_concurrency=CONCURRENCY)
    before = process.cpu_times()
    run = await run_load(target, load, {}, lambda _: None)
    after = process.cpu_times()
    if failed := [record.error for record in run.records if record.error]:
        raise EyasError(f"the gateway failed {len(failed)} of {REQUESTS} requests: {failed[0]}")
    return float(after.user + after.system - before.user - before.system)


async def _serve(port: int, grpc_port: int) -> None:
    config = dataclasses.replace(GatewayConfig(), port=port, grpc_port=grpc_port)
    tokenizer = Tokenizer.load(config.model)
    metrics = GatewayMetrics(CollectorRegistry())
    async with fronts(config, InstantBackend(vocab_size=4096), tokenizer, metrics):
        await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    from eyas.worker.lifeline import die_with_parent

    die_with_parent()
    uvloop.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
