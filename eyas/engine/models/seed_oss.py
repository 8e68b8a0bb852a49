"""Seed-OSS: Llama's layers with biases of q, k and v, and of o apart."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.models import keys


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`attention_bias` stands for biases of q, k and v, `attention_out_bias` for that of o."""
    attention = dataclasses.replace(
        keys.attention({"head_dim": 128, **raw}),
        qkv_bias=values.switch(raw, "attention_bias", True),
        output_bias=values.switch(raw, "attention_out_bias", False),
    )
    bias = values.switch(raw, "mlp_bias", False)
    layer = LayerSpec(attention, dataclasses.replace(keys.feed_forward(raw), bias=bias))
    return keys.decoder(raw, folder, [layer] * keys.count(raw))
