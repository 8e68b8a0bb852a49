"""Hunyuan with experts: the dense one's attention, and a feed-forward beside the experts in every layer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ExpertsSpec, ModelConfig
from eyas.engine.models import hunyuan, keys

RENAMED = (*hunyuan.RENAMED, (".mlp.gate.wg.", ".mlp.gate."), (".mlp.shared_mlp.", ".mlp.shared_experts."))


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`num_experts` and `moe_topk` are one number, or one for each layer. The weights of the chosen are
    always normalised.
    """
    plain, dense = hunyuan.describe(raw, folder), keys.feed_forward(raw)
    numbers, chosen = (_of_layers(raw, name, plain.num_layers) for name in ("num_experts", "moe_topk"))
    layers = [
        dataclasses.replace(
            layer,
            feed_forward=ExpertsSpec(
                width=dense.width,
                activation=dense.activation,
                experts=number,
                per_row=per_row,
                scores="softmax",
                normalised=True,
                shared_width=dense.width,
            ),
        )
        for layer, number, per_row in zip(plain.layers, numbers, chosen, strict=True)
    ]
    return dataclasses.replace(plain, layers=tuple(layers), renamed=RENAMED)


def _of_layers(raw: values.Raw, name: str, layers: int) -> tuple[int, ...]:
    if not isinstance(raw.get(name), list):
        return (values.whole(raw, name, 1, most=keys.MOST_HEADS),) * layers
    each = values.wholes(raw, name, most=keys.MOST_HEADS)
    if len(each) < layers:
        raise ValueError(f"{name} speaks of {len(each)} layers, not of {layers}")
    return each[:layers]
