"""Ministral 3: Mistral's layers, sharper behind the length of the training."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig, Temper
from eyas.engine.models import keys

DEFAULTS = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`llama_4_scaling_beta` of `rope_parameters` says by how much. A `sliding_window` is every layer's."""
    raw = DEFAULTS | {name: value for name, value in raw.items() if value is not None}
    attention = keys.attention(raw)
    scaling = keys.rope_scaling(raw)
    if beta := values.number(scaling, "llama_4_scaling_beta", 0.0):
        span = values.whole(scaling, "original_max_position_embeddings", least=1)
        attention = dataclasses.replace(attention, temper=Temper(beta, span))
    if "sliding_window" in raw:
        attention = dataclasses.replace(attention, window=keys.window_of(raw))
    return keys.decoder(raw, folder, [LayerSpec(attention, keys.feed_forward(raw))] * keys.count(raw))
