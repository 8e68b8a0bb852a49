"""Command-R7B and Command-A: Command-R with a window in three layers of four; the others rotate nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.rope import NO_ROPE
from eyas.engine.models import cohere, keys

DEFAULTS = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Without `layer_types` every `sliding_window_pattern`-th layer sees everything."""
    raw = DEFAULTS | dict(raw)
    every = values.whole(raw, "sliding_window_pattern", 4, least=1)
    windows = keys.layer_windows(raw, [(layer + 1) % every != 0 for layer in range(keys.count(raw))])
    plain = cohere.attention(raw)
    attentions = [
        dataclasses.replace(plain, window=window, rope=plain.rope if window else NO_ROPE)
        for window in windows
    ]
    return cohere.decoder(raw, folder, attentions)
