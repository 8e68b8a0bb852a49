"""Engines of the device path on a CPU, kernels interpreted: configurations, requests and their answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice
from tests.unit.loopback import Loopback, Result, wait_all
from tests.unit.tiny import write_tiny_eagle3, write_tiny_llama

# Few ids: random drafts are often right.
SIZES = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 64, "vocab": 16}
PROMPT = tuple(i * i % 13 + i % 4 for i in range(33))
PATIENCE_S = 90
DRAFTS = {
    "plain": None,
    "chain": SpeculationConfig(steps=2, topk=1, draft_tokens=3),
    "tree": SpeculationConfig(steps=2, topk=2, draft_tokens=4),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """The plain engine's."""
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny_llama(folder / "target", tied=False, **SIZES)
    head = write_head(folder / "head", target)
    return EngineConfig(
        model=str(target),
        draft=str(head),
        num_pages=32,
        chunk_tokens=16,
        max_running=4,
        context_length=128,
        pool_dir=str(tmp_path_factory.mktemp("pools")),
        worker="unified",
    )


def write_head(folder: Path, target: Path) -> Path:
    """One that taps layers of so shallow a target."""
    head = write_tiny_eagle3(folder, target)
    told = json.loads((head / "config.json").read_text())
    told["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]}
    (head / "config.json").write_text(json.dumps(told))
    return head


def on_device(plain: EngineConfig) -> EngineConfig:
    triton = {"attention_backend": "triton", "prefill_attention_backend": "triton"}
    return replace(plain, overlap_schedule=True, **triton)


def answers(config: EngineConfig, requests: list[GenerationRequest]) -> tuple[list[Result], int]:
    """What came of the requests, and how often one was preempted. Nothing is left behind."""
    cluster = Loopback(config)
    try:
        results = [cluster.submit(request, split=False) for request in requests]
        wait_all(results, PATIENCE_S)
        scheduler = cluster.workers["unified"].engine._scheduler
    finally:
        cluster.close()
    assert scheduler.pool.used == 0 and not scheduler.running
    return results, scheduler.preemptions


def tokens(results: list[Result]) -> list[dict[int, list[int]]]:
    return [result.tokens for result in results]


def requests() -> list[GenerationRequest]:
    """A scored prompt of two chunks, one with a nucleus, and two choices whose history counts."""
    greedy = SamplingParams(temperature=0.0, max_tokens=7, prompt_logprobs=2, ignore_eos=True)
    seeded = SamplingParams(temperature=0.9, top_p=0.9, seed=2**63 + 7, max_tokens=6, ignore_eos=True)
    history = SamplingParams(
        temperature=0.8, seed=3, max_tokens=4, repetition_penalty=1.3, logprobs=2, ignore_eos=True
    )
    return [
        GenerationRequest("chunks", PROMPT[:22], greedy),
        GenerationRequest("nucleus", (5, 9, 11), seeded),
        GenerationRequest("history", (7, 8, 7, 8, 9), history, (RequestChoice(0), RequestChoice(1))),
    ]


def rounds(result: Result) -> list[tuple[int, ...]]:
    entries = sorted(result.entries, key=lambda entry: (entry.choice, entry.index))
    return [entry.tokens for entry in entries]


def logprobs(result: Result) -> list[float]:
    """Of every token, and of the best at its place, by choice."""
    entries = sorted(result.entries, key=lambda entry: (entry.choice, entry.index))
    told = [logprob for entry in entries for logprob in entry.logprobs]
    assert len(told) == sum(map(len, result.tokens.values()))
    return [number for one in told for number in (one.logprob, *(value for _, value in one.top))]
