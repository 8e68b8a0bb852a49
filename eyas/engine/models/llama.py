"""Llama 2, 3 and 3.1: the plain decoder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.models import keys


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`attention_bias` stands for biases of q, k, v and o, `mlp_bias` for those of gate, up and down."""
    bias = values.switch(raw, "attention_bias", False)
    attention = dataclasses.replace(keys.attention(raw), qkv_bias=bias, output_bias=bias)
    mlp_bias = values.switch(raw, "mlp_bias", False)
    layer = LayerSpec(attention, dataclasses.replace(keys.feed_forward(raw), bias=mlp_bias))
    return keys.decoder(raw, folder, [layer] * keys.count(raw))
