"""ERNIE 4.5, dense: Llama's layers, rotated by neighbours."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.models import keys

DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`use_bias` stands for biases of all products. Where keys are left out they are `DEFAULTS`."""
    raw = DEFAULTS | dict(raw)
    attention = dataclasses.replace(keys.biased(raw, "use_bias", keys.attention(raw)), adjacent=True)
    bias = values.switch(raw, "use_bias", False)
    layer = LayerSpec(attention, dataclasses.replace(keys.feed_forward(raw), bias=bias))
    return keys.decoder(raw, folder, [layer] * keys.count(raw), tied=True)
