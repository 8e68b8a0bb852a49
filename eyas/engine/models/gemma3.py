"""Gemma 3, text: Gemma 2 with head norms, one global layer in six, and a RoPE of their own for each kind.

Of a checkpoint that also reads images the language model is served, under its own names.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.models import gemma2, keys

DEFAULTS = {
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "vocab_size": 262208,
}
"""What published configurations leave out."""

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`layer_types`, or without them `sliding_window_pattern`, say which layers have the window."""
    if "text_config" in raw:
        return dataclasses.replace(describe(keys.text_of(raw), folder), renamed=keys.TEXT_NAMES)
    if raw.get("attn_logit_softcapping"):
        raise ConfigError(f"config.json of {folder}: attn_logit_softcapping of a Gemma 3 is not supported")
    raw = DEFAULTS | dict(raw)
    local_theta = values.number(raw, "rope_local_base_freq", LOCAL_THETA)
    everywhere, within = keys.ropes_of_kinds(raw, GLOBAL_THETA, local_theta)
    plain = dataclasses.replace(gemma2.scaled(raw, keys.attention(raw, everywhere)), head_norms=True)
    every = values.whole(raw, "sliding_window_pattern", 6, least=1)
    windows = keys.layer_windows(raw, [(layer + 1) % every != 0 for layer in range(keys.count(raw))])
    attentions = [
        dataclasses.replace(plain, window=window, rope=within if window else everywhere) for window in windows
    ]
    return gemma2.decoder(raw, folder, attentions)
