"""Whole engines on tiny models of each family, and transformers' tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from families import VOCAB
from loopback import Loopback, wait_all

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest

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
