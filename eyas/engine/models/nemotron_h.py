"""Nemotron-H and Nemotron 3: blocks with one half each, most of the mixers with a state of Mamba-2; experts
and feed-forwards without gates.

A mixer and the feed-forward behind it, if there is one, are a layer here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ExpertsSpec, FeedForwardSpec, LayerSpec, ModelConfig, NormNames
from eyas.engine.checkpoint.rope import NO_ROPE
from eyas.engine.checkpoint.stacked_tensors import JoinedTensor, StackedTensor
from eyas.engine.models import deepseek, keys, mamba2
from eyas.engine.states.shape import SpaceShape

DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 21504,
    "mlp_hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "layer_norm_epsilon": 1e-5,
    "norm_topk_prob": True,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "time_step_min": 0.001,
}
"""What a config.json may leave out."""

LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
ENDS = (
    ("backbone.", "model."),
    ("model.embeddings.", "model.embed_tokens."),
    ("model.norm_f.", "model.norm."),
    (".fc1_latent_proj.", ".latent_in."),
    (".fc2_latent_proj.", ".latent_out."),
)
STACKED = (
    StackedTensor("experts.up_proj", ("up_proj.weight",)),
    StackedTensor("experts.down_proj", ("down_proj.weight",)),
)


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Nothing is rotated. `hybrid_override_pattern` has a letter for each block."""
    raw = DEFAULTS | dict(raw)
    raw |= {"rms_norm_eps": raw["layer_norm_epsilon"], "hidden_act": raw["mlp_hidden_act"]}
    if values.switch(raw, "attention_bias", False):
        raise ConfigError(f"config.json of {folder}: attention_bias is not supported")
    if raw.get("moe_latent_size") is not None and values.switch(raw, "mlp_bias", False):
        raise ConfigError(f"config.json of {folder}: mlp_bias beside moe_latent_size is not supported")
    kinds, states = _kinds(raw), _states(raw, folder)
    attention = keys.attention(raw, NO_ROPE)
    halves = _halves(kinds)
    layers = []
    for mixer, behind in halves:
        feed_forward = _feed_forward(raw, kinds[behind]) if behind else FeedForwardSpec(0)
        norms = NormNames() if behind else NormNames(before_feed_forward="")
        state = states if kinds[mixer] == "linear_attention" else None
        layers.append(LayerSpec(attention, feed_forward, norms, delta=state))
    fused: tuple[JoinedTensor, ...] = (*mamba2.joined(states), *STACKED)
    plain = keys.decoder(raw, folder, layers)
    return dataclasses.replace(plain, renamed=tuple(_renamed(kinds, halves)), fused=fused)


def _kinds(raw: values.Raw) -> list[str]:
    """The kind of each block."""
    names: Sequence[str] = values.words(raw, "layers_block_type") or values.words(raw, "layer_types")
    if not names:
        names = [LETTERS.get(letter, letter) for letter in str(raw["hybrid_override_pattern"])]
    kinds = [mamba2.OLD_NAMES.get(kind, kind) for kind in names]
    if strange := sorted(set(kinds) - set(LETTERS.values())):
        raise ConfigError(f"layers_block_type {values.said(strange)} is not supported")
    return kinds


def _halves(kinds: Sequence[str]) -> list[tuple[int, int]]:
    """The blocks of each layer: its mixer, and its feed-forward (0: there is none)."""
    halves: list[tuple[int, int]] = []
    for block, kind in enumerate(kinds):
        if kind in ("linear_attention", "full_attention"):
            halves.append((block, 0))
        elif not halves or halves[-1][1]:
            raise ConfigError(f"layers_block_type: block {block} is a feed-forward without a mixer before it")
        else:
            halves[-1] = (halves[-1][0], block)
    return halves


def _feed_forward(raw: values.Raw, kind: str) -> FeedForwardSpec:
    dense = keys.plain_feed_forward(raw, bias=values.switch(raw, "mlp_bias", False))
    if kind == "mlp":
        return dense
    experts: ExpertsSpec = deepseek.corrected_experts(dict(raw) | {"hidden_act": "silu"})
    shared = keys.width_of(raw, "moe_shared_expert_intermediate_size")
    return dataclasses.replace(
        experts,
        activation=dense.activation,
        gated=False,
        shared_width=shared,
        bias=dense.bias,
        latent=values.whole(raw, "moe_latent_size", 0, most=keys.MOST_COLUMNS),
    )


def _states(raw: values.Raw, folder: Path) -> SpaceShape:
    names = {
        "mamba_n_heads": "mamba_num_heads",
        "mamba_d_head": "mamba_head_dim",
        "mamba_n_groups": "n_groups",
        "mamba_d_state": "ssm_state_size",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_proj_bias": "use_bias",
    }
    shape = mamba2.shape({name: raw[there] for name, there in names.items()}, folder)
    limits = (values.number(raw, "time_step_min"), math.inf)
    return dataclasses.replace(shape, limits=limits, norm_groups=shape.key_heads)


def _renamed(kinds: Sequence[str], halves: Sequence[tuple[int, int]]) -> list[tuple[str, str]]:
    """Names of blocks, each of which has a norm and a half, as those of layers."""
    names = list(ENDS)
    for layer, (mixer, behind) in enumerate(halves):
        half = "linear_attn" if kinds[mixer] == "linear_attention" else "self_attn"
        parts = [(mixer, "input_layernorm", half)]
        parts += [(behind, "post_attention_layernorm", "mlp")] if behind else []
        for block, norm, there in parts:
            names += [
                (f"model.layers.{block}.norm.", f"layer.{layer}.{norm}."),
                (f"model.layers.{block}.mixer.", f"layer.{layer}.{there}."),
            ]
    return [*names, ("layer.", "model.layers.")]
