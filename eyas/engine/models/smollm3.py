"""SmolLM3: Llama's layers, of which every fourth rotates nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.checkpoint.rope import NO_ROPE
from eyas.engine.models import keys

DEFAULT_INTERVAL, DEFAULT_THETA = 4, 2_000_000.0


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`no_rope_layers` has a 0 for each layer that rotates nothing, and a 1 for each that does; without it
    every `no_rope_layer_interval`-th is of the first kind. `use_sliding_window` gives some a window.
    """
    number = keys.count(raw)
    every = values.whole(raw, "no_rope_layer_interval", DEFAULT_INTERVAL, least=1)
    rotates = values.wholes(raw, "no_rope_layers") or [int((i + 1) % every != 0) for i in range(number)]
    if len(rotates) < number:
        raise ConfigError(f"no_rope_layers speaks of {len(rotates)} layers, not of {number}")
    windows = [0] * number
    if values.switch(raw, "use_sliding_window", False) and raw.get("sliding_window") is not None:
        windows = keys.layer_windows(raw, [not rotated for rotated in rotates[:number]])
    rope = keys.read_rope(raw, keys.rope_scaling(raw), DEFAULT_THETA)
    plain = keys.biased(raw, "attention_bias", keys.attention(raw, rope))
    feed_forward = keys.feed_forward(raw)
    feed_forward = dataclasses.replace(feed_forward, bias=values.switch(raw, "mlp_bias", False))
    attentions = [
        dataclasses.replace(plain, window=window, rope=rope if rotated else NO_ROPE)
        for window, rotated in zip(windows, rotates, strict=False)
    ]
    return keys.decoder(raw, folder, [LayerSpec(each, feed_forward) for each in attentions], tied=True)
