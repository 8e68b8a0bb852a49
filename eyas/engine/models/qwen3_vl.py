"""Qwen3-VL, dense: of a checkpoint that also reads images the language model, a Qwen3."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.models import keys, qwen2_vl, qwen3

DEFAULTS = {"head_dim": 128, "rope_theta": 500_000.0}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """What images give to the first layers, text does not."""
    text = qwen2_vl.text(raw, DEFAULTS)
    return dataclasses.replace(qwen3.describe(text, folder), renamed=keys.TEXT_NAMES)
