"""A hybrid on a GPU, in graphs: transformers' greedy tokens, from cached states, with chains, and preempted.

A token is right if transformers in float32 gives no other a logit that is higher by more than `SLACK`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.common.config import EngineConfig, SpeculationConfig, resolve_engine
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from tests.unit.hybrid_rig import write_hybrid
from tests.unit.loopback import Loopback, wait_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
]

SLACK = 0.25  # of the standard deviation of logits
VOCAB, NEW = 2048, 80
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 2048,
}
WAYS = {
    "plain": {},
    "chain": {"speculation": SpeculationConfig(steps=3, draft_tokens=4, ngram=True)},
    "preempted": {"num_pages": 40, "state_slots": 4, "context_length": 600},
}


def prompts() -> list[tuple[int, ...]]:
    """Texts that part at several places, with repetitions that lookups find."""
    draw = torch.Generator().manual_seed(2)
    pattern = torch.randint(3, VOCAB, (50,), generator=draw).tolist()
    text = pattern + torch.randint(3, VOCAB, (200,), generator=draw).tolist() + pattern * 6
    return [tuple(text[:cut] + pattern[:7]) for cut in (3, 64, 100, 300, 301, 500)]


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    asked = {"draft": None, "num_pages": 512, "pool_dir": str(folder), "max_running": 8, "chunk_tokens": 256}
    return resolve_engine("cuda", model=str(folder / "model"), **asked | changes)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_transformers_own(tmp_path: Path, way: str) -> None:
    model = write_hybrid(tmp_path / "model", "qwen3_5", **SIZES).cuda()
    cluster = Loopback(replace(config_of(tmp_path, **WAYS[way]), worker="unified"))
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    try:
        for turn in range(2):  # the second time from states that the first one left
            made = [GenerationRequest(f"{turn} {i}", prompt, params) for i, prompt in enumerate(prompts())]
            results = [cluster.submit(one, split=False) for one in made]
            wait_all(results, 120)
            for one, result in zip(made, results, strict=True):
                _judge(model, one.prompt_ids, result.tokens[0])
        scheduler = cluster.workers["unified"].engine._scheduler
        assert scheduler.cache.states.hits
        assert scheduler.preemptions or way != "preempted"
    finally:
        cluster.close()
    assert not scheduler.cache.states.pool.used


def _judge(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]], device="cuda")).logits[0].float()
    rows = logits[len(prompt) - 1 : -1]
    told = rows.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
    assert (rows.amax(1) - told).max() <= SLACK * float(rows.std())
