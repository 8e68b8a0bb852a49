"""Granite 4: most layers have a state of Mamba-2; experts with one beside them, or that one alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.rope import NO_ROPE
from eyas.engine.models import granite, granite_moe, keys, mamba2

STATES = ((".mamba.", ".linear_attn."),)
DENSE = (
    (".shared_mlp.input_linear.", ".mlp.gate_up_proj."),
    (".shared_mlp.output_linear.", ".mlp.down_proj."),
)


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Nothing is rotated, unless `position_embedding_type` is "rope"."""
    shared = values.whole(raw, "shared_intermediate_size", 1024, most=keys.MOST_COLUMNS)
    raw = dict(raw) | {"shared_intermediate_size": shared}
    if values.whole(raw, "num_local_experts", 8):
        plain = granite_moe.describe(raw, folder)
    else:
        raw |= {"intermediate_size": shared}
        plain = granite.describe(raw, folder)
        joined = keys.gate_up(plain.layers[0].feed_forward)
        plain = dataclasses.replace(plain, renamed=DENSE, fused=(joined,))
    if raw.get("position_embedding_type") != "rope":
        layers = tuple(
            dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, rope=NO_ROPE))
            for layer in plain.layers
        )
        plain = dataclasses.replace(plain, layers=layers)
    states = mamba2.shape(raw, folder)
    kinds = values.words(raw, "layer_types") or values.words(raw, "layers_block_type")
    plain = mamba2.with_states(plain, kinds, states)
    fused = plain.fused + mamba2.joined(states)
    return dataclasses.replace(plain, renamed=plain.renamed + STATES, fused=fused)
