"""Bamba: most layers have a state of Mamba-2; the others' heads are rotated in their first half."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig, NormNames
from eyas.engine.models import keys, mamba2

DEFAULTS = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 262_144}
"""What a config.json may leave out."""

RENAMED = (
    (".mamba.", ".linear_attn."),
    (".feed_forward.", ".mlp."),
    ("model.final_layernorm.", "model.norm."),
)


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`attention_bias` stands for biases of q, k, v and o."""
    raw = DEFAULTS | dict(raw) | {"partial_rotary_factor": 0.5}
    attention = keys.biased(raw, "attention_bias", keys.attention(raw))
    norms = NormNames(before_feed_forward="pre_ff_layernorm")
    layer = LayerSpec(attention, keys.feed_forward(raw), norms)
    number, attends = keys.count(raw), set(values.wholes(raw, "attn_layer_indices"))
    kinds = ["attention" if i in attends else "mamba" for i in range(number)]
    states = mamba2.shape(raw, folder)
    plain = mamba2.with_states(keys.decoder(raw, folder, [layer] * number), kinds, states)
    return dataclasses.replace(plain, renamed=RENAMED, fused=mamba2.joined(states))
