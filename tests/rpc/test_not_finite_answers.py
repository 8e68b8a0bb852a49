"""Weights that turn to NaN on a running worker: requests fail by name in each layout, the canary says so."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client import CollectorRegistry
from real_cluster import RealCluster, real_cluster
from real_worker import RealWorker, tiny_config
from scripted_backend import nano_tokenizer
from scripted_cluster import until

from eyas.common.config import EngineConfig, GatewayConfig
from eyas.common.types import Role
from gateway.backends.generate import ClusterBackend
from gateway.http.front import create_app
from gateway.observe.canary import CanarySchedule
from gateway.observe.metrics import GatewayMetrics
from tests.rpc.flying_canary import flying
from tests.rpc.real_cluster import BOTH

SAID = "the model gave NaN or infinity as logits of this request"
PATIENCE_S = 30.0
PACE = CanarySchedule(every_s=0.1, again_s=0.1, timeout_s=PATIENCE_S, busy_timeout_s=PATIENCE_S)
BODY: dict[str, Any] = {
    "model": "eyas-nano",
    "prompt": [5 + i % 40 for i in range(100)],
    "max_tokens": 6,
    "ignore_eos": True,
    "temperature": 0,
}
SPLIT = ((Role.PREFILL,), (Role.PREFILL,), (Role.DECODE,))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return tiny_config(tmp_path_factory.mktemp("models"))


@contextlib.contextmanager
def poisoned(*workers: RealWorker) -> Iterator[None]:
    """The weights of the last norm are NaN meanwhile, as of memory that went bad."""
    models = [worker.engine._parts.runner.model for worker in workers]
    good = [model._norm for model in models]
    for model in models:
        model._norm = torch.full_like(model._norm, torch.nan)
    try:
        yield
    finally:
        for model, gain in zip(models, good, strict=True):
            model._norm = gain


async def check_it_fails_by_name(http: httpx.AsyncClient) -> None:
    """As a whole and as a stream, in whose last event it may stand."""
    whole = await http.post("/v1/completions", json=BODY)
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "logits_not_finite"), whole.text
    assert whole.json()["error"]["message"] == SAID
    stream = await http.post("/v1/completions", json=BODY | {"stream": True})
    if stream.status_code == 200:
        told = [line[6:] for line in stream.text.splitlines() if '"error"' in line]
        assert json.loads(told[0])["error"]["code"] == "logits_not_finite", stream.text
    else:
        assert stream.json()["error"]["code"] == "logits_not_finite"


@pytest.mark.parametrize(
    "ill", ["unified", *(pytest.param(ill, marks=pytest.mark.slow) for ill in ("prefill", "all")), "decode"]
)
async def test_the_error_is_the_same_in_every_layout(config: EngineConfig, tmp_path: Path, ill: str) -> None:
    """With another worker left that could try the prompt again: it would only cost twice as much."""
    roles = (BOTH,) if ill == "unified" else SPLIT
    async with real_cluster(config, tmp_path, roles) as cluster:
        fine = await cluster.http.post("/v1/completions", json=BODY)
        assert fine.status_code == 200, fine.text
        bad = {"prefill": cluster.workers[:-1], "decode": cluster.workers[-1:]}.get(ill, cluster.workers)
        with poisoned(*bad):
            for _ in range(3):
                await check_it_fails_by_name(cluster.http)
            for worker in cluster.workers:
                await worker.idle()
        again = await cluster.http.post("/v1/completions", json=BODY)
        assert again.json()["choices"] == fine.json()["choices"]


@contextlib.asynccontextmanager
async def watched(cluster: RealCluster) -> AsyncIterator[tuple[httpx.AsyncClient, GatewayMetrics]]:
    """An HTTP front with a canary before the cluster."""
    async with flying(ClusterBackend(cluster.cluster), PACE) as (canary, metrics):
        app = create_app(
            GatewayConfig(),
            canary,
            nano_tokenizer(),
            GatewayMetrics(CollectorRegistry()),  # type: ignore[arg-type]
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=20) as http:
            await until(lambda: not canary.health().problem, PATIENCE_S)
            yield http, metrics


@pytest.mark.parametrize(
    ("roles", "stage"), [((BOTH,), "prefill"), (SPLIT[1:], "prefill")], ids=["unified", "split"]
)
async def test_the_canary_notices(
    config: EngineConfig, tmp_path: Path, roles: tuple[tuple[Role, ...], ...], stage: str
) -> None:
    async with real_cluster(config, tmp_path, roles) as cluster, watched(cluster) as (http, metrics):

        async def health() -> tuple[int, str]:
            response = await http.get("/health")
            return response.status_code, response.text

        def failed() -> float:
            return metrics.registry.get_sample_value("eyas_canary_runs_total", {"outcome": "failed"}) or 0.0

        assert (await health())[0] == 200
        with poisoned(cluster.workers[0]):
            await until(lambda: failed() > 0, PATIENCE_S)
            status, text = await health()
            assert status == 503 and f"{stage} failed: {SAID}" in text
            assert cluster.workers[0].load.logits_not_finite > 0
        runs = metrics.registry.get_sample_value("eyas_canary_runs_total", {"outcome": "ok"}) or 0.0
        await until(
            lambda: metrics.registry.get_sample_value("eyas_canary_runs_total", {"outcome": "ok"}) > runs,
            PATIENCE_S,
        )
        assert (await health())[0] == 200
