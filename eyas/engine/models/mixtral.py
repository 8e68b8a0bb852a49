"""Mixtral: Mistral's layers with experts in every one, under names of their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.models import keys, mistral

RENAMED = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)

DEFAULTS = {"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """The weights of the chosen are always normalised, and a window is every layer's.

    Where keys are left out they are `DEFAULTS`.
    """
    plain = mistral.describe(DEFAULTS | dict(raw) | {"layer_types": None}, folder)
    experts = keys.local_experts(raw, "softmax")
    layers = tuple(dataclasses.replace(layer, feed_forward=experts) for layer in plain.layers)
    return dataclasses.replace(plain, layers=layers, renamed=RENAMED)
