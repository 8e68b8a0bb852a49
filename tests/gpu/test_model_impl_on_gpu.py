"""Models that transformers computes, on a GPU: whole engines, in graphs, give its own greedy tokens.

A token is right if transformers in float32 gives no other a logit that is higher by more than `SLACK`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.common.config import EngineConfig, SpeculationConfig, resolve_engine
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from tests.unit.families import SAMPLES, write_family
from tests.unit.foreign_families import FOREIGN
from tests.unit.loopback import Loopback, wait_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
]

SLACK = {"float32": 0.002, "bfloat16": 0.25}  # of the standard deviation of logits
SIZES: dict[str, Any] = {"vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 2}
LENGTHS, NEW = (5, 150, 301), 24


def config_of(folder: Path, dtype: str, **changes: Any) -> EngineConfig:
    asked = {"model_impl": "transformers", "draft": None, "num_pages": 256, "pool_dir": str(folder)}
    asked |= {"dtype": dtype, "transfer": "none", "max_running": 8, "chunk_tokens": 256}
    return resolve_engine("cuda", model=str(folder / "model"), **asked | changes)


def answers(config: EngineConfig, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    cluster = Loopback(replace(config, worker="unified"))
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    try:
        results = [
            cluster.submit(GenerationRequest(f"r{i}", prompt, params), split=False)
            for i, prompt in enumerate(prompts)
        ]
        wait_all(results, 120)
        return [result.tokens[0] for result in results]
    finally:
        cluster.close()


@pytest.mark.parametrize("dtype", SLACK)
@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo", "minicpm3", "exaone_moe"])
def test_tokens_are_transformers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    for other, sample in FOREIGN.items():
        monkeypatch.setitem(SAMPLES, other, sample)
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    if name == "exaone_moe":
        kinds["mlp_layer_types"] = ["dense", "sparse"]
    more = kinds if name in ("gemma2", "exaone_moe") else {}
    model = write_family(tmp_path / "model", name, std=0.05, **SIZES, **more).cuda()
    generator = torch.Generator().manual_seed(2)
    prompts = [tuple(torch.randint(3, 2048, (n,), generator=generator).tolist()) for n in LENGTHS]
    ngram = SpeculationConfig(steps=3, draft_tokens=4, ngram=True)
    for changes in ({}, {"speculation": ngram}):
        for prompt, tokens in zip(
            prompts, answers(config_of(tmp_path, dtype, **changes), prompts), strict=True
        ):
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *tokens]], device="cuda")).logits[0].float()
            rows = logits[len(prompt) - 1 : -1]
            told = rows.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
            assert (rows.amax(1) - told).max() <= SLACK[dtype] * float(rows.std())
