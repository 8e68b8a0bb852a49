"""Qwen3, dense: Qwen2 with norms of each query and key head instead of biases."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.models import keys
from eyas.engine.models.qwen2 import windowed


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`attention_bias` stands for biases of q, k, v and o."""
    bias = values.switch(raw, "attention_bias", False)
    plain = keys.attention(raw)
    return windowed(raw, folder, dataclasses.replace(plain, head_norms=True, qkv_bias=bias, output_bias=bias))
