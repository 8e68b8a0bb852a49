"""A cluster with adapters as a user starts it, on the embedded model: two gateways, a killed worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyas.common.config import NANO, NANO_HEAD
from tests.e2e.served import START_S, Folders, Served, serving, wait_until
from tests.unit.adapter_rig import write_adapter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a busy machine takes minutes to start a cluster
BASE, OWN, LOADED = "eyas-nano", "own", ("b", "c")
NAMES = (BASE, OWN, *LOADED)
PROMPT = "List three animals, and say what each of them eats."
Answers = dict[tuple[str, int], tuple[int, ...]]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate((OWN, *LOADED)):
        write_adapter(folder / name, NANO, rank=4 * 2**seed, seed=seed, size=0.3)
    return folder


@pytest.fixture(scope="module", params=["split", "auto"])
def served(adapters: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    flags = ["--lora", f"{OWN}={adapters / OWN}", "--lora-dir", str(adapters), "--max-loras", "2"]
    flags += ["--layout", request.param, "--gateway-workers", "2"]
    with serving(Folders(str(NANO), str(NANO_HEAD)), *flags) as served:
        yield served


def post(served: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(served.url + path, json=body, timeout=60, trust_env=False)


async def ask(served: Served, names: Sequence[str], **more: Any) -> Answers:
    """Each name is asked greedily (0) and with a seed, all at once, each by a connection of its own."""

    async def one(name: str, seed: int) -> tuple[int, ...]:
        body = {"model": name, "prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}
        body |= {"temperature": float(seed > 0), "seed": seed, "return_token_ids": True}
        async with httpx.AsyncClient(timeout=120, trust_env=False) as http:
            response = await http.post(f"{served.url}/v1/completions", json=body | more)
        assert response.status_code == 200, response.text
        return tuple(response.json()["choices"][0]["token_ids"])

    cases = [(name, seed) for name in names for seed in (0, 7)]
    return dict(zip(cases, await asyncio.gather(*(one(*case) for case in cases)), strict=True))


def names_of_workers(served: Served) -> list[set[str]]:
    workers = httpx.get(f"{served.url}/cluster", timeout=10, trust_env=False).json()["workers"]
    rosters = [worker["adapters"]["adapters"] for worker in workers if worker["adapters"]]
    return [{adapter["name"] for adapter in roster} for roster in rosters]


async def test_answers_outlive_a_worker_and_stay_what_they_are_alone(served: Served) -> None:
    for name in LOADED:
        response = post(served, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": name})
        assert response.status_code == 200, response.text
    alone: Answers = {}
    for name in NAMES:
        alone |= await ask(served, [name], speculative=False)
    assert len(set(alone.values())) == len(alone)
    assert await ask(served, NAMES) == alone  # together, drafted for, by both gateways
    victim = next(
        process
        for process in served.descendants()
        if any(flag.startswith("--roles=") and "decode" in flag for flag in process.cmdline())
    )
    running = asyncio.create_task(ask(served, NAMES))
    await asyncio.sleep(0.4)
    victim.kill()
    assert await running == alone
    await asyncio.to_thread(wait_until, lambda: names_of_workers(served) == [{OWN, *LOADED}] * 2, START_S)
    assert await ask(served, NAMES) == alone
    assert post(served, "/unload_lora_adapter", {"lora_name": OWN}).status_code == 200
    refused = [post(served, "/v1/completions", {"model": OWN, "prompt": "x"}) for _ in range(8)]
    assert [response.status_code for response in refused] == [404] * 8  # whichever gateway is asked
