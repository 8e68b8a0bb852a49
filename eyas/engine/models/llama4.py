"""Llama 4, text: layers that attend in chunks, layers that rotate nothing, and experts in some of them.

Of a checkpoint that also reads images the language model is served, under its own names.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelConfig,
    Temper,
)
from eyas.engine.checkpoint.rope import NO_ROPE
from eyas.engine.checkpoint.stacked_tensors import StackedTensor
from eyas.engine.models import keys

DEFAULTS = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "attention_chunk_size": 8192,
}
"""What a `text_config` may leave out."""

RENAMED = (
    *keys.TEXT_NAMES,
    (".feed_forward.router.", ".feed_forward.gate."),
    (".feed_forward.shared_expert.", ".feed_forward.shared_experts."),
    (".feed_forward.", ".mlp."),
)
STACKED = (
    StackedTensor("experts.gate_up_proj", ("gate_proj.weight", "up_proj.weight"), transposed=True),
    StackedTensor("experts.down_proj", ("down_proj.weight",), transposed=True),
)


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`layer_types` say which layers attend in chunks; without them those that rotate do."""
    raw = DEFAULTS | dict(keys.text_of(raw))
    number = keys.count(raw)
    every = values.whole(raw, "no_rope_layer_interval", 4, least=1)
    rotates = values.wholes(raw, "no_rope_layers") or tuple(int((i + 1) % every != 0) for i in range(number))
    kinds = values.words(raw, "layer_types") or tuple(
        "chunked_attention" if each else "full_attention" for each in rotates
    )
    if min(len(rotates), len(kinds)) < number or set(kinds) - {"chunked_attention", "full_attention"}:
        raise ConfigError(f"no_rope_layers {rotates} or layer_types {values.said(list(kinds))} do not fit")
    chunk = values.whole(raw, "attention_chunk_size") if raw["attention_chunk_size"] is not None else 0
    attentions = [
        dataclasses.replace(_attention(raw, bool(turned)), chunk=chunk if kind == "chunked_attention" else 0)
        for turned, kind in zip(rotates[:number], kinds, strict=False)
    ]
    layers = map(LayerSpec, attentions, _feed_forwards(raw))
    return dataclasses.replace(keys.decoder(raw, folder, list(layers)), renamed=RENAMED, fused=STACKED)


def _attention(raw: values.Raw, rotates: bool) -> AttentionSpec:
    """Heads are normalised where they rotate, and queries sharpened where they do not: by
    `attn_temperature_tuning`, a switch that some files write as a number.
    """
    plain = keys.biased(raw, "attention_bias", keys.attention(raw))
    if rotates:
        return dataclasses.replace(plain, adjacent=True, bare_norms=values.switch(raw, "use_qk_norm", True))
    temper, tuned = None, raw.get("attn_temperature_tuning")
    if bool(tuned) if isinstance(tuned, int) else values.switch(raw, "attn_temperature_tuning", True):
        span = values.whole(raw, "floor_scale", 8192, least=1)
        temper = Temper(values.number(raw, "attn_scale", 0.1), span, first=1)
    return dataclasses.replace(plain, rope=NO_ROPE, temper=temper)


def _feed_forwards(raw: values.Raw) -> list[FeedForwardSpec]:
    """Experts are in `moe_layers`, or without them in every `interleave_moe_layer_step`-th layer."""
    dense = keys.feed_forward(dict(raw) | {"intermediate_size": keys.width_of(raw, "intermediate_size_mlp")})
    width, number = keys.width_of(raw, "intermediate_size"), keys.count(raw)
    experts = ExpertsSpec(
        width=width,
        activation=dense.activation,
        experts=values.whole(raw, "num_local_experts", most=keys.MOST_HEADS),
        per_row=values.whole(raw, "num_experts_per_tok"),
        scores="sigmoid",
        normalised=False,
        weighs_input=True,
        shared_width=width,
    )
    every = values.whole(raw, "interleave_moe_layer_step", 1, least=1)
    sparse = set(range(every - 1, number, every))
    if raw.get("moe_layers") is not None:
        sparse = set(values.wholes(raw, "moe_layers"))
    return [experts if i in sparse else dense for i in range(number)]
