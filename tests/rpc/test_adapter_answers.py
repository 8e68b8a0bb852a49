"""Clusters with adapters: an answer is its adapter's, to the bit, in every layout, with and without drafts,
whatever else runs, and also if its worker leaves or its adapter is unloaded meanwhile.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_cluster import RealCluster, real_cluster
from real_worker import tiny_config

from eyas.common.config import EngineConfig
from eyas.common.types import Role
from tests.unit.adapter_rig import write_adapter, write_merged

BASE, NAMES = "eyas-nano", ("a", "b", "c")
WHOLE = (Role.PREFILL, Role.DECODE, Role.DRAFT)
LAYOUTS = {
    "unified": (WHOLE,),
    "split": ((Role.PREFILL,), (Role.DECODE,), (Role.DRAFT,)),
    "migrated": (WHOLE, WHOLE),
}
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
PROMPT = [5 + i % 40 for i in range(70)]
Answer = tuple[int, ...]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Fewer slots than adapters: some wait for others."""
    folder = tmp_path_factory.mktemp("models")
    made = dataclasses.replace(tiny_config(folder), max_loras=2)
    for seed, name in enumerate(NAMES):
        write_adapter(folder / "adapters" / name, folder / "target", rank=4 * 2**seed, seed=seed)
    return made


def folder_of(config: EngineConfig) -> Path:
    return Path(config.model).parent / "adapters"


def asked(name: str, params: dict[str, Any], tokens: int = 16) -> dict[str, Any]:
    return {
        "model": name,
        "prompt": PROMPT,
        "max_tokens": tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        **params,
    }


async def ask(http: httpx.AsyncClient, name: str, params: dict[str, Any], tokens: int = 16) -> Answer:
    response = await http.post("/v1/completions", json=asked(name, params, tokens))
    assert response.status_code == 200, response.text
    return tuple(response.json()["choices"][0]["token_ids"])


async def load_all(http: httpx.AsyncClient) -> None:
    for name in NAMES:
        response = await http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": name})
        assert response.status_code == 200, response.text


@pytest.fixture(scope="module")
def alone(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Answer]:
    """Each answer, by name and whether it is seeded: of one worker that drafts nothing, one by one."""
    plain = dataclasses.replace(config, draft=None)
    folder = tmp_path_factory.mktemp("pools")

    async def answers() -> dict[tuple[str, bool], Answer]:
        async with real_cluster(
            plain, folder, [(Role.PREFILL, Role.DECODE)], lora_dir=folder_of(config)
        ) as cluster:
            await load_all(cluster.http)
            return {
                (name, params is SEEDED): await ask(cluster.http, name, params)
                for name in (BASE, *NAMES)
                for params in (GREEDY, SEEDED)
            }

    made = asyncio.run(answers())
    assert len(set(made.values())) == len(made)  # else nothing is shown
    return made


@pytest.mark.parametrize(
    "layout", ["split", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("unified", "migrated"))]
)
async def test_adapters_and_the_model_answer_together_as_alone(
    config: EngineConfig, tmp_path: Path, alone: dict[tuple[str, bool], Answer], layout: str
) -> None:
    async with real_cluster(config, tmp_path, LAYOUTS[layout], lora_dir=folder_of(config)) as cluster:
        await load_all(cluster.http)
        cases = [(name, params) for name in (BASE, *NAMES) for params in (GREEDY, SEEDED)]
        asks = [ask(cluster.http, name, params | {"n": 1}) for name, params in cases]
        if layout == "migrated":
            asks.append(leave_in_the_middle(cluster))  # type: ignore[arg-type]
        answers = await asyncio.gather(*asks)
        for (name, params), answer in zip(cases, answers, strict=False):
            assert answer == alone[name, params is SEEDED], (name, params)
        again = await ask(cluster.http, "b", GREEDY)  # its pages are cached, and those of others are not its
        assert again == alone["b", False]


async def leave_in_the_middle(cluster: RealCluster) -> None:
    """One of two workers leaves while both answer."""
    first = cluster.workers[0]
    async with asyncio.timeout(20):
        while not first.load.running:
            await asyncio.sleep(0.01)
    await first.stop()


async def test_an_answer_is_that_of_the_merged_model(
    config: EngineConfig, tmp_path: Path, alone: dict[tuple[str, bool], Answer]
) -> None:
    """In float32 no near-tie comes between."""
    model = write_merged(tmp_path / "merged", Path(config.model), folder_of(config) / "a")
    merged = dataclasses.replace(config, model=str(model), draft=None, max_loras=0)
    async with real_cluster(merged, tmp_path, [(Role.PREFILL, Role.DECODE)]) as cluster:
        for params in (GREEDY, SEEDED):
            assert await ask(cluster.http, BASE, params) == alone["a", params is SEEDED]


@pytest.mark.parametrize("layout", ["unified", pytest.param("split", marks=pytest.mark.slow)])
async def test_what_runs_when_its_adapter_is_unloaded_goes_on_to_its_end(
    config: EngineConfig, tmp_path: Path, alone: dict[tuple[str, bool], Answer], layout: str
) -> None:
    async with real_cluster(config, tmp_path, LAYOUTS[layout], lora_dir=folder_of(config)) as cluster:
        await load_all(cluster.http)
        running = asyncio.create_task(ask(cluster.http, "a", GREEDY, tokens=300))
        decode = next(one for one in cluster.workers if Role.DECODE in one.front.describe().roles)
        async with asyncio.timeout(20):
            while not decode.load.adapters.running:
                await asyncio.sleep(0.005)
        response = await cluster.http.post("/unload_lora_adapter", json={"lora_name": "a"})
        assert response.status_code == 200, response.text
        refused = await cluster.http.post("/v1/completions", json=asked("a", GREEDY))
        assert refused.status_code == 404
        another = {"lora_name": "a", "lora_path": "c"}  # the name is free at once
        response = await cluster.http.post("/v1/load_lora_adapter", json=another)
        assert response.status_code == 200 and not running.done()
        assert await ask(cluster.http, "a", GREEDY) == alone["c", False]
        assert (await running)[:16] == alone["a", False]
