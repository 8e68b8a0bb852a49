"""Qwen3 with experts: its attention, and in all layers but those named a feed-forward of experts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import AttentionSpec, ExpertsSpec, LayerSpec, ModelConfig
from eyas.engine.models import keys, qwen3


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """A window, if it is used, is that of every layer."""
    plain = qwen3.describe(dict(raw) | {"max_window_layers": 0, "layer_types": None}, folder)
    made = layers(raw, plain.layers[0].attention, experts(raw))
    return dataclasses.replace(plain, layers=tuple(made))


def experts(raw: values.Raw) -> ExpertsSpec:
    """`num_experts` is `num_local_experts` of transformers 5."""
    number = "num_local_experts" if "num_local_experts" in raw else "num_experts"
    return ExpertsSpec(
        width=keys.width_of(raw, "moe_intermediate_size"),
        activation=keys.feed_forward(raw).activation,
        experts=values.whole(raw, number, most=keys.MOST_HEADS),
        per_row=values.whole(raw, "num_experts_per_tok"),
        scores="softmax",
        normalised=values.switch(raw, "norm_topk_prob", False),
    )


def layers(raw: values.Raw, attention: AttentionSpec, mixture: ExpertsSpec) -> list[LayerSpec]:
    """Dense are `mlp_only_layers`, and all but every `decoder_sparse_step`-th layer."""
    every, dense = values.whole(raw, "decoder_sparse_step", 1, least=1), keys.feed_forward(raw)
    only = set(values.wholes(raw, "mlp_only_layers"))
    sparse = [i not in only and (i + 1) % every == 0 for i in range(keys.count(raw))]
    return [LayerSpec(attention, mixture if each else dense) for each in sparse]
