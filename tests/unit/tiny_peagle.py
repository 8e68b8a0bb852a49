"""A P-EAGLE head of a few numbers: an EAGLE-3 head with a mask, and what else such heads have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.unit.tiny import edit, write_tiny_eagle, write_tiny_eagle3

DEPTHS, MASK = 6, 250  # drafts, the mask token


def write_tiny_peagle(
    folder: Path, target: Path, *, layers: int = 1, rank: int = 2, draft_vocab: int = 100, **config: Any
) -> Path:
    """With an embedding and a norm before fc of its own; `rank`: dimensions of its mask."""
    head = write_tiny_eagle3(folder, target, draft_vocab=draft_vocab)
    deep = load_file(write_tiny_eagle(folder / "other", target, layers=layers) / "model.safetensors")
    more: dict[str, Any] = {name: each for name, each in deep.items() if name.startswith("layers.")}
    more = {name: each for name, each in more.items() if not name.startswith("layers.0.")}
    draw = torch.Generator().manual_seed(8)
    more["mask_hidden"] = torch.randn(*(1,) * (rank - 1), 192, generator=draw)
    more["embed_tokens.weight"] = torch.randn(256, 64, generator=draw)
    more["input_norm.weight"] = torch.rand(192, generator=draw) + 0.5
    return edit(head, more, **{"ptd_token_id": MASK, "num_depths": DEPTHS} | config)
