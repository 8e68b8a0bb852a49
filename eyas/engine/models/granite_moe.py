"""Granite 3 with experts, which are stored as one, and, in some, a feed-forward beside them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.fused_tensors import FusedTensor
from eyas.engine.checkpoint.stacked_tensors import StackedTensor
from eyas.engine.models import granite, keys

RENAMED = (
    (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
    (".block_sparse_moe.experts.", ".mlp.experts."),  # as adapters name them
    (".shared_mlp.input_linear.", ".mlp.shared_experts.gate_up_proj."),
    (".shared_mlp.output_linear.", ".mlp.shared_experts.down_proj."),
)

STACKED = (
    StackedTensor("experts.gate_up_proj", ("gate_proj.weight", "up_proj.weight")),
    StackedTensor("experts.down_proj", ("down_proj.weight",)),
)


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """A softmax over the chosen is one over all whose weights are then divided by their sum."""
    plain = granite.describe(raw, folder)
    shared = values.whole(raw, "shared_intermediate_size", 0, most=keys.MOST_COLUMNS)
    experts = dataclasses.replace(keys.local_experts(raw, "softmax"), shared_width=shared)
    layers = tuple(dataclasses.replace(layer, feed_forward=experts) for layer in plain.layers)
    pair = tuple((f"shared_experts.{part}_proj", shared) for part in ("gate", "up"))
    beside = FusedTensor("shared_experts.gate_up_proj", pair)
    return dataclasses.replace(plain, layers=layers, renamed=RENAMED, fused=(*STACKED, beside))
