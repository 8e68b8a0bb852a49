"""Phi-1, Phi-1.5 and Phi-2: both halves of a layer side by side behind one norm, heads rotated in part."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.models import cohere, keys

RENAMED = (
    (".self_attn.dense.", ".self_attn.o_proj."),
    (".mlp.fc1.", ".mlp.up_proj."),
    (".mlp.fc2.", ".mlp.down_proj."),
    ("model.final_layernorm.", "model.norm."),
)
DEFAULTS = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Every product has a bias, logits too. Where keys are left out they are `DEFAULTS`."""
    if values.switch(raw, "qk_layernorm", False):
        raise ConfigError(f"config.json of {folder}: qk_layernorm of a Phi is not supported")
    raw = DEFAULTS | dict(raw)
    raw = raw | {"rms_norm_eps": raw["layer_norm_eps"]}
    attention = dataclasses.replace(keys.attention(raw), qkv_bias=True, output_bias=True)
    layer = LayerSpec(attention, keys.plain_feed_forward(raw, bias=True), cohere.NORMS, parallel=True)
    plain = keys.decoder(raw, folder, [layer] * keys.count(raw))
    return dataclasses.replace(plain, centred=True, norm_bias=True, head_bias=True, renamed=RENAMED)
