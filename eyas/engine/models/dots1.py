"""dots.llm1: Qwen3's heads, with windows in some layers, over DeepSeek-V3's experts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.models import deepseek, keys

DEFAULTS = {"sliding_window": 4096, "first_k_dense_replace": 0}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Without `layer_types` the layers from `max_window_layers` on have the window, if there is one."""
    raw = DEFAULTS | dict(raw)
    bias = values.switch(raw, "attention_bias", False)
    plain = dataclasses.replace(keys.attention(raw), head_norms=True, qkv_bias=bias, output_bias=bias)
    first, number = values.whole(raw, "max_window_layers", 62), keys.count(raw)
    windows = [0] * number
    if raw["sliding_window"] is not None:
        windows = keys.layer_windows(raw, [layer >= first for layer in range(number)])
    layers = [
        dataclasses.replace(layer, attention=dataclasses.replace(plain, window=window))
        for layer, window in zip(
            deepseek.layers(raw, plain, deepseek.corrected_experts(raw)), windows, strict=True
        )
    ]
    return keys.decoder(raw, folder, layers)
