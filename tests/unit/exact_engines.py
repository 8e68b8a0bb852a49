"""Engines in exact arithmetic, and tokens with their log-probabilities."""

from __future__ import annotations

import pytest

from eyas.common.config import EngineConfig
from eyas.common.types import GenerationRequest
from tests.unit.device_engines import SIZES, write_head
from tests.unit.loopback import Loopback, Result, wait_all
from tests.unit.tiny import write_tiny_llama

PATIENCE_S = 200


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny_llama(folder / "target", tied=False, **SIZES)
    return EngineConfig(
        model=str(target),
        draft=str(write_head(folder / "head", target)),
        dtype="float16",
        attention_backend="triton",
        prefill_attention_backend="triton",
        deterministic=True,
        overlap_schedule=True,
        num_pages=32,
        chunk_tokens=16,
        max_running=4,
        context_length=256,
        pool_dir=str(tmp_path_factory.mktemp("pools")),
        worker="unified",
    )


Told = list[tuple[int, float]]


def told(result: Result) -> Told:
    """Each token of an answer, with its log-probability."""
    values = [logprob.logprob for entry in result.entries for logprob in entry.logprobs]
    return list(zip(result.tokens[0], values, strict=True))


def answers(config: EngineConfig, groups: list[list[GenerationRequest]]) -> dict[str, Told]:
    """Of one engine, one group after another."""
    cluster, found = Loopback(config), {}
    try:
        for group in groups:
            results = [cluster.submit(request, split=False) for request in group]
            wait_all(results, PATIENCE_S)
            found |= {request.id: told(result) for request, result in zip(group, results, strict=True)}
    finally:
        cluster.close()
    return found
