"""Hunyuan, dense: Llama's layers, with norms of heads behind the rotation."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.models import keys

RENAMED = ((".query_layernorm.", ".q_norm."), (".key_layernorm.", ".k_norm."))


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`attention_bias` stands for biases of q, k, v and o. An `alpha` of a dynamic RoPE raises its theta for
    contexts of all lengths.
    """
    raw = {"rms_norm_eps": 1e-5, **raw}
    plain = keys.biased(raw, "attention_bias", keys.attention(raw, _rope(raw)))
    attention = dataclasses.replace(plain, head_norms=True, norms_behind=True)
    described = keys.decoder(raw, folder, [LayerSpec(attention, keys.feed_forward(raw))] * keys.count(raw))
    return dataclasses.replace(described, renamed=RENAMED)


def _rope(raw: values.Raw) -> RopeConfig:
    """The norms behind it undo whatever it multiplies heads by."""
    scaling, dim = keys.rope_scaling(raw), keys.attention(raw, RopeConfig()).head_dim
    alpha = values.number(scaling, "alpha", 0.0)
    if scaling.get("rope_type") != "dynamic" or not alpha:
        return dataclasses.replace(keys.read_rope(raw, scaling), attention_factor=1.0)
    plain = keys.read_rope(raw, {name: scaling[name] for name in ("rope_theta",) if name in scaling})
    return dataclasses.replace(plain, theta=plain.theta * alpha ** (dim / (dim - 2)))
