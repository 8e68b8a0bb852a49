"""Whole engines on tiny models of other families give transformers' tokens, with drafts and without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB, write_family
from loopback import Loopback, split_configs, wait_all
from tiny import write_tiny_eagle3

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 16
LENGTHS = (1, 30, 41, 64, 150)  # below the window of 40, across it, and beyond a block of keys
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW)


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(3, VOCAB, (n,), generator=generator).tolist()) for n in LENGTHS]


def generated(model: Any, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    found = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return found[0, len(prompt) :].tolist()


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    plain = EngineConfig(
        model=str(folder / "model"),
        draft=None,
        num_pages=256,
        chunk_tokens=48,
        pool_dir=str(folder),
        worker="unified",
    )
    return replace(plain, **changes)


def served(cluster: Loopback, *, split: bool = False) -> list[list[int]]:
    requests = [GenerationRequest(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts())]
    results = [cluster.submit(request, split=split) for request in requests]
    wait_all(results, 60)
    tokens = [result.tokens[0] for result in results]
    cluster.close()
    return tokens


@pytest.mark.parametrize(
    "name",
    ["deepseek_v3"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "cohere2",
            "hunyuan",
            "ministral3",
            "gemma2",
            "mistral",
            "qwen2_windows",
            "gemma3",
            "deepseek_v2_lite",
            "mixtral",
            "qwen3_moe",
            "gpt_oss",
        )
    ],
)
def test_a_family_is_served_as_transformers_generates(tmp_path: Path, name: str) -> None:
    model = write_family(tmp_path / "model", name)
    expected = [generated(model, prompt) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in expected}) == len(LENGTHS)
    assert served(Loopback(config_of(tmp_path))) == expected
    assert served(Loopback(*split_configs(config_of(tmp_path))[:2]), split=True) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(SpeculationConfig(steps=3), id="chain", marks=pytest.mark.slow),
        pytest.param(SpeculationConfig(3, 4, 12), id="tree"),
    ],
)
def test_drafts_change_no_token_of_a_windowed_model(tmp_path: Path, spec: SpeculationConfig) -> None:
    model = write_family(tmp_path / "model", "gemma3_linear")
    write_tiny_eagle3(tmp_path / "head", tmp_path / "model")
    expected = [generated(model, prompt) for prompt in prompts()]
    config = config_of(tmp_path, draft=str(tmp_path / "head"), speculation=spec)
    assert served(Loopback(config)) == expected


def test_cached_latents_are_found_again(tmp_path: Path) -> None:
    """The second time a prompt is asked its pages are there; only its last rows are computed."""
    model = write_family(tmp_path / "model", "deepseek_v3")
    prompt = prompts()[-1]
    expected = generated(model, prompt)
    cluster = Loopback(config_of(tmp_path))
    for cached in (0, 144):
        result = cluster.submit(GenerationRequest(f"r{cached}", prompt, GREEDY), split=False)
        wait_all([result], 60)
        assert result.tokens[0] == expected
        assert next(entry.timings for entry in result.entries if entry.timings).cached_tokens == cached
    cluster.close()
