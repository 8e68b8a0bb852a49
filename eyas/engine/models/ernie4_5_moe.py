"""ERNIE 4.5 with experts: the dense one's attention; a correction chooses by a softmax."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ExpertsSpec, ModelConfig
from eyas.engine.checkpoint.stacked_tensors import RowTensor
from eyas.engine.models import ernie4_5, keys

RENAMED = ((".mlp.moe_statics.", ".mlp.gate."),)
CORRECTIONS = RowTensor("mlp.gate.e_score_correction_bias")


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Layers with experts are those from `moe_layer_start_index` to `moe_layer_end_index` (-1: the last) that
    `moe_layer_interval` divides, counted from 1.
    """
    if values.switch(raw, "use_bias", False):
        raise ConfigError(f"config.json of {folder}: use_bias of an ERNIE 4.5 with experts is not supported")
    width = keys.width_of(raw, "moe_intermediate_size")
    heads = values.whole(raw, "num_attention_heads", least=1, most=keys.MOST_HEADS)
    usual = {"head_dim": keys.width_of(raw, "hidden_size") // heads}
    plain = ernie4_5.describe(usual | {name: raw[name] for name in raw if raw[name] is not None}, folder)
    experts = ExpertsSpec(
        width=width,
        activation=keys.feed_forward(raw).activation,
        experts=values.whole(raw, "moe_num_experts", most=keys.MOST_HEADS),
        per_row=values.whole(raw, "moe_k", 6),
        scores="softmax",
        normalised=True,
        corrected=True,
        shared_width=width * values.whole(raw, "moe_num_shared_experts", 2, most=keys.MOST_LAYERS),
    )
    every = values.whole(raw, "moe_layer_interval", 1, least=1)
    first, last = (
        values.whole(raw, "moe_layer_start_index", 1),
        values.whole(raw, "moe_layer_end_index", -1, least=-1),
    )
    with_experts = range(first, plain.num_layers if last == -1 else last + 1)
    layers = tuple(
        dataclasses.replace(layer, feed_forward=experts)
        if i in with_experts and (i + 1) % every == 0
        else layer
        for i, layer in enumerate(plain.layers)
    )
    return dataclasses.replace(plain, layers=layers, renamed=RENAMED, fused=(CORRECTIONS,))
