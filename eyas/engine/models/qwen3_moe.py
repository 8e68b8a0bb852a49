"""Qwen3 with experts: its attention, and in all layers but those named a feed-forward of experts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint.config import ExpertsSpec, ModelConfig
from eyas.engine.models import keys, qwen3


def describe(raw: keys.Raw, folder: Path) -> ModelConfig:
    """Dense are `mlp_only_layers`, and all but every `decoder_sparse_step`-th layer.

    A window, if it is used, is that of every layer. `num_experts` is `num_local_experts` of transformers 5.
    """
    plain = qwen3.describe(dict(raw) | {"max_window_layers": 0, "layer_types": None}, folder)
    experts = ExpertsSpec(
        width=int(raw["moe_intermediate_size"]),
        activation=keys.feed_forward(raw).activation,
        experts=int(raw["num_local_experts" if "num_local_experts" in raw else "num_experts"]),
        per_row=int(raw["num_experts_per_tok"]),
        scores="softmax",
        normalised=bool(raw.get("norm_topk_prob", False)),
    )
    every, dense = int(raw.get("decoder_sparse_step", 1)), set(raw.get("mlp_only_layers") or ())
    layers = [
        layer if i in dense or (i + 1) % every else dataclasses.replace(layer, feed_forward=experts)
        for i, layer in enumerate(plain.layers)
    ]
    return dataclasses.replace(plain, layers=tuple(layers))
