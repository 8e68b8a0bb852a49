"""Gemma 4, text: heads of two widths, values that are normalised, layers that share keys and values, and
in some sizes experts or vectors of a token's own for each layer.

Of a checkpoint that also reads images and sound the language model is served, under its own names.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ApartSpec, AttentionSpec, FeedForwardSpec, LayerSpec, ModelConfig
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.checkpoint.stacked_tensors import StackedTensor
from eyas.engine.models import gemma2, keys

DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
"""What a `text_config` may leave out."""

ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}

RENAMED = (
    *keys.TEXT_NAMES,
    (".router.proj.", ".mlp.gate."),
    (".router.", ".mlp.gate."),
    (".experts.", ".mlp.experts."),
)
STACKED = (
    StackedTensor("experts.gate_up_proj", ("gate_proj.weight", "up_proj.weight")),
    StackedTensor("experts.down_proj", ("down_proj.weight",)),
)

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """The last layer sees everything, whatever `layer_types` says of it."""
    raw = DEFAULTS | {key: value for key, value in keys.text_of(raw).items() if value is not None}
    if raw.get("use_bidirectional_attention") not in (None, "vision"):
        raise ConfigError(f"config.json of {folder}: use_bidirectional_attention of a Gemma is not supported")
    number = keys.count(raw)
    kinds = values.words(raw, "layer_types") or [_kind(i) for i in range(number)]
    windows = keys.layer_windows(raw | {"layer_types": [*kinds[:-1], "full_attention"]}, [])
    attentions = _shared(raw, [_attention(raw, window, i) for i, window in enumerate(windows)])
    vectors = values.whole(raw, "hidden_size_per_layer_input", most=keys.MOST_COLUMNS)
    layers = [
        LayerSpec(each, _feed_forward(raw, each), gemma2.NORMS, token_width=vectors, scaled=True)
        for each in attentions
    ]
    plain = keys.decoder(raw, folder, layers, tied=True)
    rows = keys.width_of(raw, "vocab_size_per_layer_input") if vectors else 0
    return dataclasses.replace(
        plain,
        token_rows=rows,
        embedding_scale=plain.hidden_size**0.5,
        logit_soft_cap=values.number(raw, "final_logit_softcapping", 0.0),
        renamed=RENAMED,
        fused=STACKED,
    )


def _kind(layer: int) -> str:
    return "sliding_attention" if (layer + 1) % 6 else "full_attention"


def _attention(raw: values.Raw, window: int, layer: int) -> AttentionSpec:
    """Layers that see everything have heads of `global_head_dim`, by `attention_k_eq_v`
    `num_global_key_value_heads` of them, and no values of their own; or as `per_layer_config` says.
    """
    alike = not window and values.switch(raw, "attention_k_eq_v", False)
    said = _of_layer(raw, layer)
    if said is None and not window:
        said = {"head_dim": raw["global_head_dim"]}
        if alike:
            said["num_key_value_heads"] = raw.get("num_global_key_value_heads", raw["num_key_value_heads"])
    plain = keys.biased(
        raw, "attention_bias", keys.attention(dict(raw) | dict(said or {}), _rope(raw, window))
    )
    return dataclasses.replace(
        plain, window=window, scale=1.0, head_norms=True, value_norms=True, keys_as_values=alike
    )


def _of_layer(raw: values.Raw, layer: int) -> values.Raw | None:
    """The sizes that `per_layer_config` has for a layer; None: there is no such key."""
    if "per_layer_config" not in raw:
        return None
    each = {key.lstrip("0") or "0": value for key, value in values.section(raw, "per_layer_config").items()}
    sizes = values.section(each, str(layer))
    if strange := sorted(set(sizes) - {"head_dim", "num_key_value_heads"}):
        raise ConfigError(
            f"per_layer_config has {', '.join(strange)} of layer {layer}, which is not supported"
        )
    return sizes


def _rope(raw: values.Raw, window: int) -> RopeConfig:
    ropes = values.section(raw, "rope_parameters") or ROPES
    everywhere, within = keys.ropes_of_kinds({"rope_parameters": ropes}, GLOBAL_THETA, LOCAL_THETA)
    return within if window else everywhere


def _shared(raw: values.Raw, attentions: list[AttentionSpec]) -> list[AttentionSpec]:
    """The last `num_kv_shared_layers` have the keys and values of the last layer of their kind before."""
    number = values.whole(raw, "num_kv_shared_layers", 0)
    own = len(attentions) - number if number else len(attentions)
    latest = {bool(each.window): i for i, each in enumerate(attentions[:own])}
    if missing := [i for i, each in enumerate(attentions) if bool(each.window) not in latest]:
        raise ConfigError(f"num_kv_shared_layers {number} leaves layer {missing[0]} no keys and values")
    return [
        each if i < own else dataclasses.replace(each, shared_from=latest[bool(each.window)])
        for i, each in enumerate(attentions)
    ]


def _feed_forward(raw: values.Raw, attention: AttentionSpec) -> FeedForwardSpec:
    """A layer's feed-forward: by `use_double_wide_mlp` twice as wide where keys and values are another
    layer's; by `enable_moe_block` with experts beside it.
    """
    plain = keys.feed_forward(raw, gemma2.activation(raw))
    if values.switch(raw, "use_double_wide_mlp", False) and attention.shared_from is not None:
        plain = dataclasses.replace(plain, width=2 * plain.width)
    if not values.switch(raw, "enable_moe_block", False):
        return plain
    experts = values.whole(raw, "num_experts", least=1, most=keys.MOST_HEADS)
    return ApartSpec(
        width=keys.width_of(raw, "moe_intermediate_size"),
        activation=plain.activation,
        experts=experts,
        per_row=values.whole(raw, "top_k_experts", least=1, most=experts),
        scores="softmax",
        normalised=True,
        shared_width=plain.width,
    )
