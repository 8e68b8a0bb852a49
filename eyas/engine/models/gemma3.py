"""Gemma 3, text: Gemma 2 with head norms, one global layer in six, and a RoPE of their own for each kind.

Of a checkpoint that also reads images the language model is served, under its own names.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import ModelConfig, Rope
from eyas.engine.checkpoint.quantized import QUANTIZED
from eyas.engine.models import gemma2, keys

RENAMED = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "vocab_size": 262208,
}
"""What published configurations leave out."""

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def describe(raw: keys.Raw, folder: Path) -> ModelConfig:
    """`layer_types`, or without them `sliding_window_pattern`, say which layers have the window."""
    if "text_config" in raw:
        whole = {name: raw[name] for name in ("architectures", *QUANTIZED) if name in raw}
        text = dict(raw["text_config"]) | whole
        return dataclasses.replace(describe(text, folder), renamed=RENAMED)
    if raw.get("use_bidirectional_attention"):
        raise ConfigError(f"config.json of {folder}: use_bidirectional_attention is not supported")
    raw = DEFAULTS | dict(raw)
    everywhere, within = _ropes(raw)
    plain = dataclasses.replace(gemma2.scaled(raw, keys.attention(raw, everywhere)), head_norms=True)
    every = int(raw.get("sliding_window_pattern", 6))
    windows = keys.layer_windows(raw, [(layer + 1) % every != 0 for layer in range(keys.count(raw))])
    attentions = [
        dataclasses.replace(plain, window=window, rope=within if window else everywhere) for window in windows
    ]
    return gemma2.decoder(raw, folder, attentions)


def _ropes(raw: keys.Raw) -> tuple[Rope, Rope]:
    """Of global and of local layers, in transformers 5's spelling or the older one."""
    named = raw.get("rope_parameters")
    if named is None:
        everywhere = keys.read_rope(raw, raw.get("rope_scaling") or {}, GLOBAL_THETA)
        return everywhere, Rope(theta=float(raw.get("rope_local_base_freq", LOCAL_THETA)))
    everywhere = keys.read_rope(raw, named.get("full_attention") or {}, GLOBAL_THETA)
    return everywhere, keys.read_rope({}, named.get("sliding_attention") or {}, LOCAL_THETA)
