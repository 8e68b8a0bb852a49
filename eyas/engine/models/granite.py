"""Granite 3, dense: Llama's layers, with a multiplier of embeddings, scores, what layers add, and logits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.models import llama


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`logits_scaling` divides; the others multiply, `attention_multiplier` the scores, whole."""
    plain = llama.describe(raw, folder)
    scale = values.number(raw, "attention_multiplier", 1.0)
    added = values.number(raw, "residual_multiplier", 1.0)
    layers = tuple(
        dataclasses.replace(
            layer, attention=dataclasses.replace(layer.attention, scale=scale), residual_scale=added
        )
        for layer in plain.layers
    )
    return dataclasses.replace(
        plain,
        layers=layers,
        embedding_scale=values.number(raw, "embedding_multiplier", 1.0),
        logit_scale=1.0 / values.number(raw, "logits_scaling", 1.0),
    )
