"""Reports the load of the cluster in the formats of SGLang and vLLM, for routers in front of gateways.

SGLang's routers see the workers of a cluster as ranks of one server, each with its own load; vLLM's measure a
server by its number of running calls. Caches are reported by KV events and metrics instead.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from eyas.common.types import WorkerInfo
from gateway.backends.base import GenerationBackend
from gateway.http.openapi import HttpEndpoint
from gateway.http.pages import json_response
from gateway.observe.metrics import GatewayMetrics


class LoadEndpoints:
    """The endpoints. Each turns a request into a response."""

    def __init__(self, backend: GenerationBackend, metrics: GatewayMetrics) -> None:
        self._backend = backend
        self._metrics = metrics

    def endpoints(self) -> list[HttpEndpoint]:
        """The rows of the route table that this class answers."""
        return [
            HttpEndpoint("GET", "/v1/loads", self.loads, "The load of each worker, in SGLang's fields"),
            HttpEndpoint("GET", "/get_load", self.get_load, "The same, in SGLang's older fields"),
            HttpEndpoint("GET", "/load", self.load, "The calls that are answered now, as vLLM tells them"),
        ]

    async def loads(self, _: Request) -> Response:
        """The load of each worker, and of all."""
        return json_response(loads(self._workers(), time.time()))

    async def get_load(self, _: Request) -> Response:
        """The load of each worker, in SGLang's older format."""
        ranks = loads(self._workers(), time.time())["loads"]
        return json_response(
            [
                {
                    "dp_rank": rank["dp_rank"],
                    "num_reqs": rank["num_running_reqs"] + rank["num_waiting_reqs"],
                    "num_waiting_reqs": rank["num_waiting_reqs"],
                    "num_pending_tokens": rank["num_pending_tokens"],
                }
                for rank in ranks
            ]
        )

    async def load(self, _: Request) -> Response:
        """The number of running calls in this process of the gateway."""
        running = self._metrics.registry.get_sample_value("eyas_requests_running") or 0.0
        return json_response({"server_load": int(running)})

    def _workers(self) -> list[WorkerInfo]:
        return [link.info for link in self._backend.links()]


def loads(workers: Sequence[WorkerInfo], now: float) -> dict[str, Any]:
    """The loads of the workers that serve the model; `now`: seconds since 1970.

    The generation is common to all of them: it changes when any worker restarts, whose reported pages are
    lost.
    """
    able = [worker for worker in workers if worker.serving and worker.runs_target and worker.pages_total]
    epochs = ",".join(f"{worker.worker} {worker.epoch}" for worker in able)
    generation = hashlib.blake2b(epochs.encode(), digest_size=8).hexdigest()
    usages = [min(worker.pages_used / worker.pages_total, 1.0) for worker in able]
    ranks = [
        {
            "dp_rank": rank,
            "worker": worker.worker,
            "worker_generation": generation,
            "timestamp": now,
            "num_running_reqs": worker.running,
            "num_waiting_reqs": worker.waiting,
            "num_pending_tokens": worker.backlog.queued,
            "token_usage": usage,
        }
        for rank, (worker, usage) in enumerate(zip(able, usages, strict=True))
    ]
    running, waiting = (sum(getattr(worker, name) for worker in able) for name in ("running", "waiting"))
    return {
        "timestamp": now,
        "dp_rank_count": len(ranks),
        "loads": ranks,
        "aggregate": {
            "total_running_reqs": running,
            "total_waiting_reqs": waiting,
            "total_reqs": running + waiting,
            "avg_token_usage": sum(usages) / max(len(usages), 1),
        },
    }
