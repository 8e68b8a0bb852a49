"""Mistral Small 3.1 and later, Ministral 3: of a checkpoint that also reads images the language model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.models import keys, ministral3, mistral


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """The `model_type` of its `text_config` says which of two it is."""
    text = keys.text_of(raw)
    described = ministral3.describe if text.get("model_type") == "ministral3" else mistral.describe
    return dataclasses.replace(described(text, folder), renamed=keys.TEXT_NAMES)
