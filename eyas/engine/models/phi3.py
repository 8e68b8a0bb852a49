"""Phi-3 and Phi-4-mini: q, k and v stored as one tensor, gate and up as another; heads rotated in part."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.checkpoint.fused_tensors import FusedTensor
from eyas.engine.models import keys


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Older files call the longrope of their angles "su" or "yarn"."""
    scaling = keys.rope_scaling(raw)
    if scaling.get("rope_type") in ("su", "yarn"):
        scaling = dict(scaling) | {"rope_type": "longrope"}
    attention = keys.attention(raw, keys.read_rope(raw, scaling))
    if raw.get("sliding_window"):
        attention = dataclasses.replace(attention, window=keys.window_of(raw))
    layer = LayerSpec(attention, keys.feed_forward(raw))
    plain = keys.decoder({"rms_norm_eps": 1e-5, **raw}, folder, [layer] * keys.count(raw))
    queries, keys_too = (n * attention.head_dim for n in (attention.num_heads, attention.num_kv_heads))
    qkv = ("q_proj", queries), ("k_proj", keys_too), ("v_proj", keys_too)
    fused = FusedTensor("qkv_proj", qkv), keys.gate_up(layer.feed_forward)
    return dataclasses.replace(plain, fused=fused)
