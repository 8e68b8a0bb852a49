"""Arcee (AFM): Llama's layers without gates."""

from __future__ import annotations

from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.models import keys

DEFAULTS = {"hidden_act": "relu2", "rms_norm_eps": 1e-5}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`attention_bias` stands for biases of q, k, v and o, `mlp_bias` for those of up and down."""
    raw = DEFAULTS | dict(raw)
    attention = keys.biased(raw, "attention_bias", keys.attention(raw))
    layer = LayerSpec(attention, keys.plain_feed_forward(raw, bias=values.switch(raw, "mlp_bias", False)))
    return keys.decoder(raw, folder, [layer] * keys.count(raw))
