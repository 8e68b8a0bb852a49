"""GLM-4 as of 2025 (0414): GLM with norms around both halves."""

from __future__ import annotations

from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig, NormNames
from eyas.engine.models import glm

NORMS = NormNames(
    before_attention="input_layernorm",
    after_attention="post_self_attn_layernorm",
    before_feed_forward="post_attention_layernorm",
    after_feed_forward="post_mlp_layernorm",
)


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """All else is GLM's."""
    return glm.described(raw, folder, NORMS)
