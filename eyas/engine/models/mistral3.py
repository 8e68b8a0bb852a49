"""Mistral Small 3.1 to 4 and Ministral 3: of a checkpoint that also reads images the language model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.models import keys, ministral3, mistral, mistral4

SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
DEFAULTS = {
    "mistral": {"vocab_size": 32000, "num_hidden_layers": 32, "max_position_embeddings": 131_072},
    "ministral3": {"vocab_size": 131_072, "num_hidden_layers": 34, "max_position_embeddings": 262_144},
}
"""What a `text_config` may leave out, of `SIZES` too, by the kind of its model."""


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """The `model_type` of its `text_config` says which of three it is."""
    text = keys.text_of(raw)
    kind = text.get("model_type") or "mistral"
    if kind == "mistral4":
        return dataclasses.replace(mistral4.describe(text, folder), renamed=keys.TEXT_NAMES)
    if kind not in DEFAULTS:
        raise ConfigError(f"config.json of {folder}: text_config of model_type {kind} is not supported")
    text = SIZES | DEFAULTS[kind] | dict(text)
    describe_text = ministral3.describe if kind == "ministral3" else mistral.describe
    described = describe_text(text, folder)
    return dataclasses.replace(described, renamed=keys.TEXT_NAMES)
