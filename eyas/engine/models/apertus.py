"""Apertus: norms of heads, and a feed-forward without a gate, whose xIELU has two numbers in each layer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig, NormNames
from eyas.engine.models import keys

NORMS = NormNames(before_attention="attention_layernorm", before_feed_forward="feedforward_layernorm")
DEFAULTS = {"hidden_act": "xielu", "rms_norm_eps": 1e-5, "rope_theta": 12e6}
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """The model of a config.json. Keys that it leaves out are `DEFAULTS`, its RoPE `ROPE`."""
    raw = DEFAULTS | dict(raw)
    rope = keys.read_rope(raw, keys.rope_scaling(raw) or ROPE)
    plain = keys.biased(raw, "attention_bias", keys.attention(raw, rope))
    attention = dataclasses.replace(plain, head_norms=True)
    layer = LayerSpec(attention, keys.plain_feed_forward(raw), NORMS)
    return keys.decoder(raw, folder, [layer] * keys.count(raw))
