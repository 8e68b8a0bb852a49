"""A worker that starts with adapters after the weights have changed answers as the others do."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client import CollectorRegistry
from real_worker import RealWorker, tiny_config
from safetensors.torch import load_file, save_file
from scripted_backend import nano_tokenizer
from scripted_cluster import until

from eyas.common.cluster.discovery import registry
from eyas.common.cluster.listening import free_ports
from eyas.common.config import AdapterConfig, EngineConfig, GatewayConfig
from eyas.common.types import Role
from gateway.backends.generate import ClusterBackend
from gateway.http.front import create_app
from gateway.observe.metrics import GatewayMetrics
from gateway.routing.cluster import Cluster
from tests.unit.adapter_rig import write_adapter

BOTH = (Role.PREFILL, Role.DECODE)
PROMPT = [5 + i % 40 for i in range(70)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A model, in `new` the same with other numbers, gains of norms too, and an adapter."""
    folder, chance = tmp_path_factory.mktemp("models"), torch.Generator().manual_seed(3)
    config = dataclasses.replace(tiny_config(folder), draft=None, roles=BOTH, max_loras=2)
    write_adapter(folder / "tuned", folder / "target", rank=8)
    shutil.copytree(folder / "target", folder / "new")
    stored = load_file(folder / "new" / "model.safetensors")
    for name, tensor in stored.items():
        size = 0.4 if "norm" in name else 0.3 * tensor.std()
        stored[name] = tensor + size * torch.randn(tensor.shape, generator=chance)
    save_file(stored, folder / "new" / "model.safetensors")
    return config


@pytest.mark.slow
async def test_a_worker_that_joins_late_has_the_weights_and_adapters_of_the_others(
    config: EngineConfig, tmp_path: Path
) -> None:
    folder, ports = Path(config.model).parent, free_ports()
    first, second = (next(ports) for _ in "ab")
    known = f"static:127.0.0.1:{first},127.0.0.1:{second}"
    engine = dataclasses.replace(config, pool_dir=str(tmp_path))
    own = AdapterConfig(loras=(("tuned", str(folder / "tuned")),))
    early = await RealWorker(engine, known, first, adapters=own).start()
    cluster = Cluster(registry(known))
    await cluster.start()
    gateway = GatewayConfig(grpc_port=0)
    app = create_app(gateway, ClusterBackend(cluster), nano_tokenizer(), GatewayMetrics(CollectorRegistry()))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=20) as http:
        await until(lambda: any(info.serving for info in cluster.workers()))
        before = [await answer(http, name) for name in ("eyas-nano", "tuned")]
        fields = {"model_path": str(folder / "new"), "weight_version": "new"}
        said = (await http.post("/update_weights_from_disk", json=fields)).json()
        assert said["success"], said
        after = [await answer(http, name) for name in ("eyas-nano", "tuned")]
        assert all(one != other for one, other in zip(before, after, strict=True))
        late = await RealWorker(engine, known, second, adapters=own).start()
        await until(lambda: sum(info.serving for info in cluster.workers()) == 2)
        await early.stop()
        await until(lambda: [info.worker for info in cluster.workers() if info.serving] == [late.address])
        assert [await answer(http, name) for name in ("eyas-nano", "tuned")] == after
        assert late.load.weights.version == "new"
    await cluster.aclose()
    await late.stop()


async def answer(http: httpx.AsyncClient, name: str) -> tuple[list[int], str]:
    """Of the model or of an adapter, and the weights that it says it is of."""
    fields = {"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0.0}
    body = fields | {"ignore_eos": True, "return_token_ids": True}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    said: dict[str, Any] = response.json()
    return said["choices"][0]["token_ids"], said.get("metadata", {}).get("weight_version", "default")
