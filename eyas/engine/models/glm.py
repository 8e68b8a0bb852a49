"""GLM-4 as of 2024: heads rotated in part and by neighbours, biases of q, k and v, gate and up as one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig, NormNames
from eyas.engine.models import keys

DEFAULTS = {
    "attention_bias": True,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Every layer is alike."""
    return described(raw, folder, NormNames())


def described(raw: values.Raw, folder: Path, norms: NormNames) -> ModelConfig:
    """A decoder with these norms. Where keys are left out they are `DEFAULTS`."""
    raw = DEFAULTS | dict(raw)
    bias = values.switch(raw, "attention_bias", True)
    attention = dataclasses.replace(keys.attention(raw), qkv_bias=bias, adjacent=True)
    layer = LayerSpec(attention, keys.feed_forward(raw), norms)
    plain = keys.decoder(raw, folder, [layer] * keys.count(raw))
    return dataclasses.replace(plain, fused=(keys.gate_up(layer.feed_forward),))
