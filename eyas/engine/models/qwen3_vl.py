"""Qwen3-VL, dense: of a checkpoint that also reads images the language model, a Qwen3."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.models import keys, qwen2_vl, qwen3

DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128_000,
    "rope_theta": 500_000.0,
}
"""What a `text_config` may leave out."""


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """What images give to the first layers, text does not."""
    text = qwen2_vl.text(raw, DEFAULTS)
    return dataclasses.replace(qwen3.describe(text, folder), renamed=keys.TEXT_NAMES)
