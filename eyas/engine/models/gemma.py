"""Gemma, the first: Gemma 2 with norms before both halves alone, and without windows and soft caps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig, NormNames
from eyas.engine.models import gemma2, keys


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`hidden_act` is another activation's name in published files; that of `hidden_activation` counts."""
    raw = {"head_dim": 256, **raw}
    attention = keys.biased(raw, "attention_bias", keys.attention(raw))
    plain = gemma2.decoder(raw, folder, [attention] * keys.count(raw))
    layers = tuple(dataclasses.replace(layer, norms=NormNames()) for layer in plain.layers)
    return dataclasses.replace(plain, layers=layers)
