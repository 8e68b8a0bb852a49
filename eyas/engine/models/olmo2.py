"""OLMo 2: norms behind both halves and none before; q and k are normalised as whole rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig, NormNames
from eyas.engine.models import keys

NORMS = NormNames(
    before_attention="",
    after_attention="post_attention_layernorm",
    before_feed_forward="",
    after_feed_forward="post_feedforward_layernorm",
)


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`attention_bias` stands for biases of q, k, v and o."""
    bias = values.switch(raw, "attention_bias", False)
    attention = dataclasses.replace(keys.attention(raw), row_norms=True, qkv_bias=bias, output_bias=bias)
    return keys.decoder(raw, folder, [LayerSpec(attention, keys.feed_forward(raw), NORMS)] * keys.count(raw))
