"""Qwen2-VL and Qwen2.5-VL: of a checkpoint that also reads images the language model, a Qwen2."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.models import keys, qwen2

DEFAULTS = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_window_layers": 80,
}
"""What a `text_config` may leave out."""


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Older files have the keys of the text beside those of the images."""
    return dataclasses.replace(
        qwen2.describe(text(keys.tied_in_either(raw), DEFAULTS), folder), renamed=keys.TEXT_NAMES
    )


def text(raw: values.Raw, defaults: values.Raw) -> values.Raw:
    """The keys of the language model; without those of its RoPE by which images have places in a plane: of
    text all three numbers of a place are the same.
    """
    language = dict(defaults) | dict(keys.text_of(raw))
    for name in ("rope_scaling", "rope_parameters"):
        scaling = dict(values.section(language, name))
        kind = scaling.pop("rope_type", None) or scaling.pop("type", None)
        aside = ("mrope_section", "mrope_interleaved", "type")
        rest = {key: value for key, value in scaling.items() if key not in aside}
        language[name] = rest | ({"rope_type": kind} if kind not in (None, "mrope", "default") else {})
    return language
