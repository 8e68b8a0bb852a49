"""Mistral: Llama's layers, in the first version with a sliding window in every one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.models import keys

DEFAULT_WINDOW = 4096


def describe(raw: keys.Raw, folder: Path) -> ModelConfig:
    """A `sliding_window` of null is none; one that is not there is the first version's."""
    window = int(raw.get("sliding_window", DEFAULT_WINDOW) or 0)
    attention = dataclasses.replace(keys.attention(raw), window=window)
    layer = LayerSpec(attention, keys.feed_forward(raw))
    return keys.decoder(raw, folder, [layer] * keys.count(raw))
