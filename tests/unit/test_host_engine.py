"""Chats of several turns in a pool that is too small for them: the host tier changes no answer, and saves work."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from loopback import Loopback, Result, wait_all

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.loop.engine import Engine
from eyas.engine.scheduling import host_loads

pytestmark = pytest.mark.usefixtures("one_thread")

CHATS, TURNS, ANSWER = 6, 4, 8
TURN_TOKENS = 40


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    """Of its 24 pages a chat needs up to 14; without a draft head, whose time is not the matter here."""
    return EngineConfig(
        draft=None, num_pages=24, max_running=2, chunk_tokens=64, pool_dir=str(tmp_path), worker="alone"
    )


def chats(config: EngineConfig) -> tuple[list[dict[int, list[int]]], int, Engine]:
    """All answers, the prompt tokens that were not computed, and the engine, which has ended."""
    rng, cluster = random.Random(5), Loopback(config)
    engine = cluster.workers["alone"].engine
    assert isinstance(engine, Engine)
    answers, cached, past = [], 0, [()] * CHATS
    try:
        for turn in range(TURNS):
            prompts = [(*said, *(rng.randrange(9, 4000) for _ in range(TURN_TOKENS))) for said in past]
            results = [cluster.submit(_request(turn, i, prompt), split=False) for i, prompt in enumerate(prompts)]
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


def test_answers_are_those_without_it(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_loads, "LEAST_TOKENS", 32)
    plain, few, _ = chats(config)
    found, many, engine = chats(replace(config, host_cache_gb=0.1))
    assert found == plain
    host, pool = engine._scheduler.host, engine._scheduler.pool
    assert host is not None
    print(host.counts, few, many, host.tier.free, pool.used)
    assert many > few
