"""EXAONE 4: OLMo 2's norms around the halves, norms of heads; the large one has windows, and rotates in them
alone.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.checkpoint.rope import NO_ROPE
from eyas.engine.models import keys, olmo2

DEFAULTS = {"sliding_window": 4096, "sliding_window_pattern": 4, "rms_norm_eps": 1e-5}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """A `sliding_window` of null is none: every layer sees everything, and rotates.

    Without `layer_types` every `sliding_window_pattern`-th sees everything, if that is a number; by a word of
    L and G those of a G, and the last one.
    """
    raw = DEFAULTS | dict(raw)
    windows = [0] * keys.count(raw)
    if raw["sliding_window"] is not None:
        windows = keys.layer_windows(raw, _windowed(raw))
    plain, feed_forward = dataclasses.replace(keys.attention(raw), head_norms=True), keys.feed_forward(raw)
    whole = plain if raw["sliding_window"] is None else dataclasses.replace(plain, rope=NO_ROPE)
    attentions = [dataclasses.replace(plain, window=window) if window else whole for window in windows]
    return keys.decoder(raw, folder, [LayerSpec(each, feed_forward, olmo2.NORMS) for each in attentions])


def _windowed(raw: values.Raw) -> list[bool]:
    pattern, count = raw["sliding_window_pattern"], keys.count(raw)
    if isinstance(pattern, str) and pattern and not set(pattern) - {"L", "G"}:
        return [pattern[layer % len(pattern)] == "L" and layer < count - 1 for layer in range(count)]
    every = values.whole(raw, "sliding_window_pattern", least=1)
    return [(layer + 1) % every != 0 for layer in range(count)]
