"""OLMoE: q and k normalised as whole rows, over experts in every layer."""

from __future__ import annotations

from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ExpertsSpec, LayerSpec, ModelConfig
from eyas.engine.models import keys, olmo2


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Its norms stand before both halves, unlike OLMo 2's."""
    if raw.get("clip_qkv") is not None:
        raise ConfigError(f"config.json of {folder}: clip_qkv is not supported")
    dense = keys.feed_forward(raw)
    experts = ExpertsSpec(
        width=dense.width,
        activation=dense.activation,
        experts=values.whole(raw, "num_experts", most=keys.MOST_HEADS),
        per_row=values.whole(raw, "num_experts_per_tok"),
        scores="softmax",
        normalised=values.switch(raw, "norm_topk_prob", False),
    )
    layer = LayerSpec(olmo2.attention(raw), experts)
    return keys.decoder({"rms_norm_eps": 1e-5, **raw}, folder, [layer] * keys.count(raw))
