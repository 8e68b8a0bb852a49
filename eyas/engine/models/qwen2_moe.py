"""Qwen2 with experts (Qwen1.5-MoE): its attention, and a shared feed-forward of which a row takes a share."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ExpertsSpec, ModelConfig
from eyas.engine.models import keys, qwen2, qwen3_moe

RENAMED = (
    (".mlp.shared_expert_gate.", ".mlp.shared_experts.share."),
    (".mlp.shared_expert.", ".mlp.shared_experts."),
)


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`qkv_bias` stands for biases of q, k and v. Without `layer_types` every other layer below
    `max_window_layers` has the window, if it is used.
    """
    attention = dataclasses.replace(keys.attention(raw), qkv_bias=values.switch(raw, "qkv_bias", True))
    first = values.whole(raw, "max_window_layers", qwen2.DEFAULT_MAX_WINDOW_LAYERS)
    windowed = [layer % 2 == 0 and layer < first for layer in range(keys.count(raw))]
    windows = [0] * len(windowed)
    if values.switch(raw, "use_sliding_window", False):
        windows = keys.layer_windows(raw, windowed)
    plain = keys.decoder(raw, folder, qwen3_moe.layers(raw, attention, experts(raw)))
    layers = tuple(
        dataclasses.replace(layer, attention=dataclasses.replace(attention, window=window))
        for layer, window in zip(plain.layers, windows, strict=True)
    )
    return dataclasses.replace(plain, layers=layers, renamed=RENAMED)


def experts(raw: values.Raw) -> ExpertsSpec:
    """The experts of Qwen3, and the shared one."""
    width = keys.width_of(raw, "shared_expert_intermediate_size")
    return dataclasses.replace(qwen3_moe.experts(raw), shared_width=width, shared_share=True)
