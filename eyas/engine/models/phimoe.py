"""Phi-3.5-MoE: norms that take off the mean, and two experts of a row, each weighed among its near equals."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.checkpoint.stacked_tensors import StackedTensor
from eyas.engine.models import keys

RENAMED = (
    (".block_sparse_moe.", ".mlp."),
    (".mlp.router.", ".mlp.gate."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
)
STACKED = (
    StackedTensor("experts.gate_up_proj", ("gate_proj.weight", "up_proj.weight")),
    StackedTensor("experts.down_proj", ("down_proj.weight",)),
)
DEFAULTS = {
    "intermediate_size": 6400,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 131_072,
}
"""What a configuration may leave out."""

JITTER = 0.01
"""Of `sparse_mixer` in `eyas.engine.layers.routing`."""


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`attention_bias` stands for biases of q, k, v and o, `lm_head_bias` for those of logits. Where angles
    are stretched, cos and sin are multiplied by `short_mscale`, which `long_mscale` must be too.
    """
    raw = DEFAULTS | {name: value for name, value in raw.items() if value is not None}
    jitter = values.number(raw, "router_jitter_noise", JITTER)
    if jitter != JITTER or values.whole(raw, "num_experts_per_tok") != 2:
        why = f"router_jitter_noise {jitter:g} with num_experts_per_tok {raw['num_experts_per_tok']}"
        raise ConfigError(f"config.json of {folder}: {why} is not supported ({JITTER:g} with 2 is)")
    attention = keys.biased(raw, "attention_bias", keys.attention(raw, _rope(raw, folder)))
    if "sliding_window" in raw:
        attention = dataclasses.replace(attention, window=keys.window_of(raw))
    experts = keys.local_experts(raw, "sparse_mixer")
    layer = LayerSpec(attention, dataclasses.replace(experts, normalised=False))
    plain = keys.decoder(raw, folder, [layer] * keys.count(raw))
    head_bias = values.switch(raw, "lm_head_bias", False)
    return dataclasses.replace(
        plain, centred=True, norm_bias=True, head_bias=head_bias, renamed=RENAMED, fused=STACKED
    )


def _rope(raw: values.Raw, folder: Path) -> RopeConfig:
    scaling = dict(keys.rope_scaling(raw))
    kind = "default" if scaling.get("rope_type") is None else scaling["rope_type"]
    if kind != "default":
        names = ("short_mscale", "long_mscale")
        short, long = (values.number(scaling, name, within="rope_scaling") for name in names)
        if short != long:
            raise ConfigError(f"config.json of {folder}: short_mscale {short} and long_mscale {long} differ")
        scaling["attention_factor"] = short
    return keys.read_rope(raw, scaling)
