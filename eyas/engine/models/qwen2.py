"""Qwen2, Qwen2.5 and MiMo-7B: Llama's layers with biases of q, k and v; upper layers may have windows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import AttentionSpec, LayerSpec, ModelConfig
from eyas.engine.models import keys

DEFAULT_MAX_WINDOW_LAYERS = 28


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Biases of q, k and v are always there: `attention_bias` is another family's key."""
    return windowed(raw, folder, dataclasses.replace(keys.attention(raw), qkv_bias=True))


def windowed(raw: values.Raw, folder: Path, attention: AttentionSpec) -> ModelConfig:
    """A decoder of this attention in every layer, from `max_window_layers` on with a window if it is used."""
    feed_forward, number = keys.feed_forward(raw), keys.count(raw)
    first = values.whole(raw, "max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
    windows = [0] * number
    if values.switch(raw, "use_sliding_window", False):
        windows = keys.layer_windows(raw, [layer >= first for layer in range(number)])
    layers = [LayerSpec(dataclasses.replace(attention, window=each), feed_forward) for each in windows]
    return keys.decoder(raw, folder, layers)
