"""Kimi-Linear: three of four layers with a state of Kimi Delta Attention, the others with latent attention
that rotates nothing; DeepSeek-V3's experts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ExpertsSpec, LayerSpec, ModelConfig
from eyas.engine.checkpoint.rope import NO_ROPE
from eyas.engine.checkpoint.stacked_tensors import StackedTensor
from eyas.engine.models import deepseek, keys, qwen3_next
from eyas.engine.states.shape import ChannelShape

DEFAULTS = {
    "num_expert_group": 1,
    "topk_group": 1,
    "num_shared_experts": 1,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "rms_norm_eps": 1e-5,
    "model_max_length": 1_048_576,
    "q_lora_rank": None,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
    "first_k_dense_replace": 1,
}
"""What a config.json may leave out."""

SPELT = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Keys of `linear_attn_config`, and their names outside it."""

STATE_NAMES = (
    (".linear_attn.q_proj.", ".linear_attn.in_proj_q."),
    (".linear_attn.k_proj.", ".linear_attn.in_proj_k."),
    (".linear_attn.v_proj.", ".linear_attn.in_proj_v."),
    (".linear_attn.a_proj.", ".linear_attn.in_proj_a."),
    (".linear_attn.b_proj.", ".linear_attn.in_proj_b."),
    (".linear_attn.g_proj.", ".linear_attn.in_proj_z."),
    (".linear_attn.f_a_proj.", ".linear_attn.in_proj_f."),
    (".linear_attn.g_a_proj.", ".linear_attn.in_proj_z."),
    (".linear_attn.q_conv1d.", ".linear_attn.conv_q."),
    (".linear_attn.k_conv1d.", ".linear_attn.conv_k."),
    (".linear_attn.v_conv1d.", ".linear_attn.conv_v."),
    (".linear_attn.o_norm.", ".linear_attn.norm."),
    (".linear_attn.o_proj.", ".linear_attn.out_proj."),
)
"""Tensors of a layer with a state as the modules of flash-linear-attention store them, and here."""

EXPERTS = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
)
STACKED = (
    StackedTensor("experts.gate_up_proj", ("gate_proj.weight", "up_proj.weight")),
    StackedTensor("experts.down_proj", ("down_proj.weight",)),
)


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """The model of a config.json. In `linear_attn_config` the first layer is number 1. Experts are stored one
    by one, or all as one.
    """
    raw = DEFAULTS | dict(raw)
    if not values.switch(raw, "mla_use_nope", True):
        raise ConfigError(f"config.json of {folder}: mla_use_nope false is not supported")
    stated = values.section(raw, "linear_attn_config")
    raw |= {there: stated[here] for here, there in SPELT.items() if here in stated}
    raw |= {"max_position_embeddings": raw["model_max_length"]}
    states = _states(raw)
    attention = dataclasses.replace(deepseek.latents(raw), rope=NO_ROPE, adjacent=False)
    dense, experts = keys.feed_forward(raw), _experts(raw)
    kinds, parts = _kinds(raw, stated), _parts(raw)
    layers = [
        LayerSpec(attention, experts if sparse else dense, delta=states if recurs else None)
        for recurs, sparse in zip(kinds, parts, strict=True)
    ]
    own = [f"model.layers.{i}." for i, recurs in enumerate(kinds) if recurs]
    moved = tuple((f"{prefix}self_attn.", f"{prefix}linear_attn.") for prefix in own)
    plain = keys.decoder(raw, folder, layers)
    return dataclasses.replace(plain, renamed=(*moved, *STATE_NAMES, *EXPERTS), fused=STACKED)


def _kinds(raw: values.Raw, stated: values.Raw) -> list[bool]:
    """Whether each layer has a state: by `layer_types`, or by the numbers of those that have one."""
    if "layer_types" in raw:
        return qwen3_next.recurring(raw)
    with_state = values.wholes(stated, "kda_layers", least=1)
    return [number in with_state for number in range(1, keys.count(raw) + 1)]


def _parts(raw: values.Raw) -> list[bool]:
    """Whether each layer has experts."""
    if "mlp_layer_types" in raw:
        return [name == "sparse" for name in values.words(raw, "mlp_layer_types")]
    first = values.whole(raw, "first_k_dense_replace")
    return [number >= first for number in range(keys.count(raw))]


def _states(raw: values.Raw) -> ChannelShape:
    heads = values.whole(raw, "linear_num_heads", least=1, most=keys.MOST_HEADS)
    size = values.whole(raw, "linear_head_dim", least=1, most=keys.MOST_HEADS)
    kernel = values.whole(raw, "linear_conv_kernel_dim", least=1)
    return ChannelShape(heads, heads, size, size, kernel, rank=size)


def _experts(raw: values.Raw) -> ExpertsSpec:
    named = {
        "n_routed_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
        "n_group": "num_expert_group",
        "norm_topk_prob": "moe_renormalize",
    }
    return deepseek.corrected_experts(dict(raw) | {name: raw[there] for name, there in named.items()})
