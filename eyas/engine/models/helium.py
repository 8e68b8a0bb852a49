"""Helium: Llama's layers, rotated by neighbours."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.models import keys

DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100_000.0}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`attention_bias` stands for biases of q, k and v. Where keys are left out they are `DEFAULTS`."""
    raw = DEFAULTS | dict(raw)
    bias = values.switch(raw, "attention_bias", False)
    attention = dataclasses.replace(keys.attention(raw), adjacent=True, qkv_bias=bias)
    mlp_bias = values.switch(raw, "mlp_bias", False)
    layer = LayerSpec(attention, dataclasses.replace(keys.feed_forward(raw), bias=mlp_bias))
    return keys.decoder(raw, folder, [layer] * keys.count(raw))
