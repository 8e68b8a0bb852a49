"""OLMo 3: OLMo 2 with a window in three layers of four, which alone are not stretched to long contexts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.models import keys, olmo2

DEFAULT_THETA, DEFAULT_WINDOW = 500_000.0, 4096


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`layer_types` say which layers have the window; without them all but every fourth."""
    raw = {"rms_norm_eps": 1e-5, "sliding_window": DEFAULT_WINDOW, **raw}
    theta = values.number(raw, "rope_theta", DEFAULT_THETA)
    everywhere, within = keys.ropes_of_kinds(raw, theta, theta)
    windows = keys.layer_windows(raw, [(layer + 1) % 4 != 0 for layer in range(keys.count(raw))])
    plain = olmo2.attention(raw, everywhere)
    attentions = [
        dataclasses.replace(plain, window=window, rope=within if window else everywhere) for window in windows
    ]
    return keys.decoder(
        raw, folder, [LayerSpec(each, keys.feed_forward(raw), olmo2.NORMS) for each in attentions]
    )
