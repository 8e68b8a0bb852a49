"""Mistral and Ministral: Llama's layers, with a sliding window in all (the first version), some or none."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.models import keys

DEFAULT_WINDOW = 4096


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """A `sliding_window` of null is none; one that is not there is the first version's.

    `layer_types` say which layers have it, under either name of the architecture; without them all do.
    """
    raw = {"sliding_window": DEFAULT_WINDOW, **raw}
    attention, feed_forward = keys.attention(raw), keys.feed_forward(raw)
    windows = keys.layer_windows(raw, [raw["sliding_window"] is not None] * keys.count(raw))
    layers = [LayerSpec(dataclasses.replace(attention, window=window), feed_forward) for window in windows]
    return keys.decoder(raw, folder, layers)
