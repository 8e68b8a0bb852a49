"""Mamba-2, alone; and its layers in the config.json of a hybrid as Bamba and Granite write it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.fused_tensors import FusedTensor
from eyas.engine.models import keys, mamba
from eyas.engine.states.shape import SpaceShape

DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
"""What a config.json may leave out."""

OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


ALONE = {
    "mamba_n_heads": "num_heads",
    "mamba_d_head": "head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
    "time_step_limit": "time_step_limit",
}
"""The keys of hybrids, and of a model of such layers alone."""


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """The norm behind a gate has as many groups as there are of keys, as the authors' own code has it."""
    usual = {"num_heads": 128, "head_dim": 64, "n_groups": 8, "state_size": 128}
    raw = usual | {name: value for name, value in raw.items() if value is not None}
    states = shape({here: raw.get(there) for here, there in ALONE.items()}, folder)
    states = dataclasses.replace(states, norm_groups=states.key_heads)
    plain = mamba.alone(raw, folder, states)
    return dataclasses.replace(plain, fused=joined(states))


def shape(raw: values.Raw, folder: Path) -> SpaceShape:
    """The shape of the states, by the keys of Bamba."""
    raw = DEFAULTS | {name: value for name, value in raw.items() if value is not None}
    if values.switch(raw, "mamba_proj_bias", False):
        raise ConfigError(f"config.json of {folder}: mamba_proj_bias is not supported")
    heads = values.whole(raw, "mamba_n_heads", least=1, most=keys.MOST_HEADS)
    size = raw.get("mamba_d_head", "auto")
    if size == "auto":
        size = values.whole(raw, "mamba_expand", least=1) * keys.width_of(raw, "hidden_size") // heads
    low, high = _limits(raw.get("time_step_limit", [0.0, math.inf]))
    return SpaceShape(
        key_heads=values.whole(raw, "mamba_n_groups", least=1, most=keys.MOST_HEADS),
        value_heads=heads,
        key_size=values.whole(raw, "mamba_d_state", least=1, most=keys.MOST_HEADS),
        value_size=values.whole({"mamba_d_head": size}, "mamba_d_head", least=1, most=keys.MOST_HEADS),
        kernel=values.whole(raw, "mamba_d_conv", least=1),
        limits=(low, high),
        bias=values.switch(raw, "mamba_conv_bias", True),
    )


def _limits(stated: Any) -> tuple[float, float]:
    """The limits of steps, as JSON has them or as transformers writes what JSON has no word for."""
    try:
        low, high = (float(each["__float__"] if isinstance(each, Mapping) else each) for each in stated)
    except (TypeError, ValueError, KeyError):
        raise ValueError(f"time_step_limit {values.said(stated)} must be two numbers") from None
    return low, high


def with_states(plain: ModelConfig, kinds: Sequence[str], states: SpaceShape) -> ModelConfig:
    """The decoder whose layers of the kind "linear_attention", or "mamba", have such a state."""
    kinds = [OLD_NAMES.get(kind, kind) for kind in kinds]
    if len(kinds) != plain.num_layers or set(kinds) - set(OLD_NAMES.values()):
        raise ConfigError(f"layer_types {values.said(kinds)} are not mamba or attention for each layer")
    layers = tuple(
        dataclasses.replace(layer, delta=states if kind == "linear_attention" else None)
        for layer, kind in zip(plain.layers, kinds, strict=True)
    )
    return dataclasses.replace(plain, layers=layers)


def joined(states: SpaceShape) -> tuple[FusedTensor, ...]:
    """The tensors of such a layer that are several."""
    inner, each = states.value_heads * states.value_size, states.key_heads * states.key_size
    columns = {"v": inner, "k": each, "q": each}
    rows = {"z": inner} | columns | {"a": states.value_heads}
    return (
        FusedTensor("in_proj", tuple((f"in_proj_{part}", count) for part, count in rows.items())),
        FusedTensor("conv1d", tuple((f"conv_{part}", count) for part, count in columns.items())),
    )
