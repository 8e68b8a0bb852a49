"""Requests to whole engines of one process, their tokens without drafts, and a check that nothing is left."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from types import SimpleNamespace

from loopback import Loopback, split_configs, wait_all

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice

VOCAB = 256


def mixed_requests(count: int, seed: int = 0) -> list[GenerationRequest]:
    """Mixed lengths, parameters and n."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        params = [
            SamplingParams(temperature=0.0, max_tokens=18),
            SamplingParams(temperature=0.8, top_p=0.95, seed=rng.getrandbits(64), max_tokens=18, logprobs=2),
            SamplingParams(
                temperature=1.0,
                seed=rng.getrandbits(64),
                max_tokens=16,
                min_tokens=3,
                repetition_penalty=1.2,
                presence_penalty=0.5,
                frequency_penalty=0.3,
                logit_bias={7: 4.0, 9: -50.0},
                stop_token_ids=(11, 12, 13),
                bad_words=((7, 7), (10,), (7, 3, 7)),
            ),
        ][i % 3]
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 15, 16, 17, 33, 70])))
        made.append(
            GenerationRequest(
                f"r{i}", prompt, params, tuple(RequestChoice(c) for c in range(1 + i % 4 // 3 * 2))
            )
        )
    return made


def run_all(cluster: Loopback, requests: list[GenerationRequest], *, split: bool = False) -> list[dict]:
    results = [cluster.submit(request, split=split) for request in requests]
    wait_all(results, 60)
    return [result.tokens for result in results]


def undrafted(base: EngineConfig, requests: list[GenerationRequest]) -> list[dict]:
    """The reference: no drafter, one request at a time."""
    cluster = Loopback(replace(base, draft=None))
    found = [run_all(cluster, [request])[0] for request in requests]
    cluster.close()
    return found


def assert_idle(cluster: Loopback) -> None:
    """Every worker is idle and owns no page beyond its prefix cache."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        loads = [worker.load for worker in cluster.workers.values()]
        if all(load and load.running == load.waiting == load.pages_used == 0 for load in loads):
            return
        time.sleep(0.05)
    raise AssertionError(f"still held: {loads}")


def patient(config: EngineConfig) -> Loopback:
    """The split services, where no draft comes too late, however slow the machine."""
    cluster = Loopback(*split_configs(config))
    waits = SimpleNamespace(seconds=20.0, record_step=lambda landed, seconds: None)
    cluster.by_role["decode"].engine._drafting.draft_wait = waits
    return cluster
