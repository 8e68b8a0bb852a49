"""Nemotron-3, Nemotron-4 and Minitron: norms that take off the mean, heads rotated in part, no gates."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.models import keys

DEFAULTS = {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Gains are stored less one. Where keys are left out they are `DEFAULTS`."""
    raw = DEFAULTS | dict(raw)
    raw = raw | {"rms_norm_eps": raw["norm_eps"]}
    attention = keys.biased(raw, "attention_bias", keys.attention(raw))
    layer = LayerSpec(attention, keys.plain_feed_forward(raw, bias=values.switch(raw, "mlp_bias", False)))
    plain = keys.decoder(raw, folder, [layer] * keys.count(raw))
    return dataclasses.replace(plain, centred=True, norm_bias=True, norm_offset=1.0)
