"""MiniMax-M2: q and k normalised as whole rows and rotated in part, over experts under Mixtral's names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.models import keys, mixtral

RENAMED = (
    (".block_sparse_moe.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    *mixtral.RENAMED,
)

USUAL = {
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
}
"""What published files say, and no code here computes otherwise."""


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`rotary_dim` says how many elements of a head are rotated, where no factor does."""
    for key, usual in USUAL.items():
        if (value := raw.get(key, usual)) != usual:
            raise ConfigError(f"config.json of {folder}: {key} {values.said(value)} is not supported")
    dim = values.whole(raw, "head_dim", 128, least=1)
    share = values.whole(raw, "rotary_dim", dim, most=dim) / dim
    raw = {"head_dim": dim, "rope_theta": 5e6, "partial_rotary_factor": share, **raw}
    attention = dataclasses.replace(keys.attention(raw), row_norms=True)
    experts = dataclasses.replace(keys.local_experts(raw, "sigmoid"), corrected=True)
    plain = keys.decoder(raw, folder, [LayerSpec(attention, experts)] * keys.count(raw))
    return dataclasses.replace(plain, renamed=RENAMED)
