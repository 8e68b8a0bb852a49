"""Falcon-H1: each layer attends and has a state of Mamba-2, side by side; most products have a multiplier."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import AttentionSpec, LayerSpec, ModelConfig, NormNames
from eyas.engine.checkpoint.multiplied_tensors import MultipliedTensor
from eyas.engine.checkpoint.stacked_tensors import JoinedTensor
from eyas.engine.models import keys, mamba2
from eyas.engine.states.shape import SpaceShape

DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "mamba_d_ssm": 1024,
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
}
"""What a config.json may leave out."""

RENAMED = (
    (".mamba.", ".linear_attn."),
    (".feed_forward.", ".mlp."),
    ("model.final_layernorm.", "model.norm."),
)


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`mamba_d_ssm` columns are divided among the heads of states; null stands for `mamba_expand` times the
    hidden ones.
    """
    width = raw.get("mamba_d_ssm", DEFAULTS["mamba_d_ssm"])
    raw = DEFAULTS | {name: value for name, value in raw.items() if value is not None}
    for name in ("attention_bias", "projectors_bias"):
        if values.switch(raw, name, False):
            raise ConfigError(f"config.json of {folder}: {name} is not supported")
    states = _normed(raw, _states(raw, folder, width))
    norms = NormNames(before_feed_forward="pre_ff_layernorm")
    attention, part = keys.attention(raw), keys.feed_forward(raw)
    layer = LayerSpec(attention, part, norms, delta=states, both=True)
    plain = keys.decoder(raw, folder, [layer] * keys.count(raw))
    return dataclasses.replace(
        plain,
        embedding_scale=values.number(raw, "embedding_multiplier", 1.0),
        logit_scale=values.number(raw, "lm_head_multiplier", 1.0),
        renamed=RENAMED,
        fused=(*_multiplied(raw, attention, states), *mamba2.joined(states)[1:]),
    )


def _states(raw: values.Raw, folder: Path, width: int | None) -> SpaceShape:
    """The shape of the states, for `width` columns of values."""
    shape = mamba2.shape(raw, folder)
    if width is None or raw.get("mamba_d_head", "auto") != "auto":
        return shape
    return dataclasses.replace(shape, value_size=keys.width_of(raw, "mamba_d_ssm") // shape.value_heads)


def _normed(raw: values.Raw, states: SpaceShape) -> SpaceShape:
    """With the norm beside their gate, if there is one, by as many groups as there are of keys."""
    groups = states.key_heads if values.switch(raw, "mamba_rms_norm", False) else 0
    first = bool(groups) and values.switch(raw, "mamba_norm_before_gate", True)
    return dataclasses.replace(states, norm_groups=groups, norm_first=first)


def _multiplied(raw: values.Raw, attention: AttentionSpec, states: SpaceShape) -> list[JoinedTensor]:
    """All matrices, by the numbers of their products."""
    hidden, width = keys.width_of(raw, "hidden_size"), keys.width_of(raw, "intermediate_size")
    names = ("attention_in", "attention_out", "key", "ssm_in", "ssm_out")
    into, out, key, state, back = (values.number(raw, f"{name}_multiplier", 1.0) for name in names)
    gate, down = values.numbers(raw, "mlp_multipliers")
    queries, own = (n * attention.head_dim for n in (attention.num_heads, attention.num_kv_heads))
    inner = mamba2.joined(states)[0]
    parts = zip(inner.parts, values.numbers(raw, "ssm_multipliers"), strict=True)
    whole = {
        "q_proj": (queries, into),
        "k_proj": (own, into * key),
        "v_proj": (own, into),
        "o_proj": (hidden, out),
        "out_proj": (hidden, back),
        "gate_proj": (width, gate),
        "down_proj": (hidden, down),
    }
    return [
        MultipliedTensor(inner.name, tuple((name, rows, state * factor) for (name, rows), factor in parts)),
        *(MultipliedTensor(name, ((name, rows, factor),)) for name, (rows, factor) in whole.items()),
    ]
