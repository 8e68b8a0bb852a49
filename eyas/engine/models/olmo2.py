"""OLMo 2: norms behind both halves and none before; q and k are normalised as whole rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import AttentionSpec, LayerSpec, ModelConfig, NormNames
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.models import keys

NORMS = NormNames(
    before_attention="",
    after_attention="post_attention_layernorm",
    before_feed_forward="",
    after_feed_forward="post_feedforward_layernorm",
)


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Every layer is alike."""
    layer = LayerSpec(attention(raw), keys.feed_forward(raw), NORMS)
    return keys.decoder({"rms_norm_eps": 1e-5, **raw}, folder, [layer] * keys.count(raw))


def attention(raw: values.Raw, rope: RopeConfig | None = None) -> AttentionSpec:
    """`attention_bias` stands for biases of q, k, v and o. `rope`: instead of the configured one."""
    return keys.biased(raw, "attention_bias", dataclasses.replace(keys.attention(raw, rope), row_norms=True))
