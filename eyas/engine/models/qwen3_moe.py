"""Qwen3 with experts: its attention, and in all layers but those named a feed-forward of experts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ExpertsSpec, ModelConfig
from eyas.engine.models import keys, qwen3


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Dense are `mlp_only_layers`, and all but every `decoder_sparse_step`-th layer.

    A window, if it is used, is that of every layer. `num_experts` is `num_local_experts` of transformers 5.
    """
    plain = qwen3.describe(dict(raw) | {"max_window_layers": 0, "layer_types": None}, folder)
    number = "num_local_experts" if "num_local_experts" in raw else "num_experts"
    experts = ExpertsSpec(
        width=keys.width_of(raw, "moe_intermediate_size"),
        activation=keys.feed_forward(raw).activation,
        experts=values.whole(raw, number, most=keys.MOST_HEADS),
        per_row=values.whole(raw, "num_experts_per_tok"),
        scores="softmax",
        normalised=values.switch(raw, "norm_topk_prob", False),
    )
    every = values.whole(raw, "decoder_sparse_step", 1, least=1)
    dense = set(values.wholes(raw, "mlp_only_layers"))
    layers = [
        layer if i in dense or (i + 1) % every else dataclasses.replace(layer, feed_forward=experts)
        for i, layer in enumerate(plain.layers)
    ]
    return dataclasses.replace(plain, layers=tuple(layers))
