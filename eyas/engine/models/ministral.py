"""Ministral: Mistral's layers, of which some have the window."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.models import keys


def describe(raw: keys.Raw, folder: Path) -> ModelConfig:
    """`layer_types` say which; without them all have it, where there is one."""
    attention, feed_forward, count = keys.attention(raw), keys.feed_forward(raw), keys.count(raw)
    windows = keys.layer_windows(raw, [raw.get("sliding_window") is not None] * count)
    layers = [LayerSpec(dataclasses.replace(attention, window=window), feed_forward) for window in windows]
    return keys.decoder(raw, folder, layers)
