"""Chats of several turns in a pool too small for them: the host tier changes no answer, and saves work."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loopback import Loopback, Result, wait_all

from eyas.cluster.plan import HostResources, plan
from eyas.common.config import EngineConfig, ServeConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role
from eyas.engine.ipc.messages import CancelGeneration
from eyas.engine.loop.engine import Engine
from eyas.engine.scheduling import host_loads

pytestmark = pytest.mark.usefixtures("one_thread")

CHATS, TURNS, ANSWER = 4, 3, 4
TURN_TOKENS = 44


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """Of its pages two chats need nearly all."""
    monkeypatch.setattr(host_loads, "LEAST_TOKENS", 32)
    return EngineConfig(num_pages=18, max_running=2, chunk_tokens=64, pool_dir=str(tmp_path), worker="alone")


def chats(config: EngineConfig) -> tuple[list[dict[int, list[int]]], int, Engine]:
    """All answers, the prompt tokens that were not computed, and the engine, which has ended."""
    rng, cluster = random.Random(5), Loopback(config)
    engine = cluster.workers["alone"].engine
    assert isinstance(engine, Engine)
    answers, cached, past = [], 0, [()] * CHATS
    try:
        for turn in range(TURNS):
            prompts = [(*said, *(rng.randrange(9, 4000) for _ in range(TURN_TOKENS))) for said in past]
            results = [
                cluster.submit(_request(turn, i, prompt), split=False) for i, prompt in enumerate(prompts)
            ]
            wait_all(results, 60)
            answers += [result.tokens for result in results]
            cached += sum(_cached(result) for result in results)
            past = [(*prompt, *result.tokens[0]) for prompt, result in zip(prompts, results, strict=True)]
    finally:
        cluster.close()
    return answers, cached, engine


def _request(turn: int, chat: int, prompt: tuple[int, ...]) -> GenerationRequest:
    params = SamplingParams(temperature=0.8 * (chat % 2), seed=chat, max_tokens=ANSWER, ignore_eos=True)
    return GenerationRequest(f"{turn}.{chat}", prompt, params)


def _cached(result: Result) -> int:
    return next(entry.timings.cached_tokens for entry in result.entries if entry.timings)


@pytest.mark.parametrize(
    "changes",
    [{"draft": None}, pytest.param({}, marks=pytest.mark.slow)],  # with draft KV in the same pages
    ids=["plain", "drafts"],
)
def test_answers_are_those_without_it(config: EngineConfig, changes: dict[str, None]) -> None:
    config = replace(config, **changes)
    plain, few, _ = chats(config)
    found, many, engine = chats(replace(config, host_cache_gb=0.05))
    assert found == plain
    host, pool = engine._scheduler.host, engine._scheduler.pool
    assert host is not None and host.counts.tokens > 0 and many > few
    assert pool.used == 0 and pool.free + engine._scheduler.cache.cached_pages == pool.num_pages
    assert len(host.tier._pages) + host.tier.free == host.tier._known
    assert host.counts.bytes_in == host.counts.tokens // config.page_size * host.tier.memory.page_bytes


def test_cancelled_at_any_moment(config: EngineConfig) -> None:
    """Requests that come back to evicted pages, and leave again at once or a little later."""
    rng, cluster = random.Random(7), Loopback(replace(config, draft=None, host_cache_gb=0.05))
    worker = cluster.workers["alone"]
    engine = worker.engine
    assert isinstance(engine, Engine)
    texts = [tuple(rng.randrange(9, 4000) for _ in range(100)) for _ in range(4)]
    try:
        for i in range(16):
            text = texts[i % 4]
            result = cluster.submit(_request(i, i % 2, text), split=False)
            if i < 5:
                wait_all([result], 30)
            else:
                time.sleep(rng.choice([0.0, 0.002, 0.01]))
                worker.send(CancelGeneration(f"{i}.{i % 2}"))
        wait_all([cluster.submit(_request(16, 0, texts[0]), split=False)], 30)
    finally:
        cluster.close()
    host, pool = engine._scheduler.host, engine._scheduler.pool
    assert host is not None and host.counts.tokens > 0
    loading = {page for load in host._loads for page in load.pages}
    assert all(not pool.owners(page) or page in loading for page in range(pool.num_pages))
    assert len(host.tier._pages) + host.tier.free == host.tier._known


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"host_cache_gb": 1e6}, "--host-cache-gb: 1e+06 GiB asked for, and the host has"),
        ({"host_cache_gb": 1e-6}, "--host-cache-gb: 1e-06 GiB hold no page of"),
        ({"host_cache_gb": 1.0, "tensor_parallel_size": 2}, "GPUs that share a model have no host tier"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    config: EngineConfig, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        Loopback(replace(config, **changes))
    assert why in refused.value.message and refused.value.param == "host-cache-gb"


def test_a_draft_worker_passes_over_the_flags_of_tiers(config: EngineConfig, tmp_path: Path) -> None:
    """One list of flags can then serve all workers, as EYAS_WORKER_FLAGS of docker/compose.yaml does."""
    tiers = {
        "host_cache_gb": 1e6,
        "disk_cache_dir": str(tmp_path / "pages"),
        "kv_store": "redis://nobody:1/0",
    }
    decode = replace(config, roles=(Role.PREFILL, Role.DECODE))
    cluster = Loopback(decode, replace(config, worker="drafter", roles=(Role.DRAFT,), **tiers))
    cluster.close()
    assert not (tmp_path / "pages").exists()


def test_draft_workers_of_a_cluster_have_none() -> None:
    config = ServeConfig(engine=EngineConfig(host_cache_gb=2.0))
    workers = plan(config, iter(range(7001, 7100)), HostResources(cores=4)).workers
    assert {name: worker.engine.host_cache_gb for name, worker in workers.items()} == {
        "prefill-0": 2.0,
        "decode-0": 2.0,
        "draft-0": 0.0,
    }
