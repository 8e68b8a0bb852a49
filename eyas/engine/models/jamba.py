"""Jamba: most layers have a state of Mamba (1), whose steps, keys and queries are normed; the others attend
and rotate nothing. Every other feed-forward is of experts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ExpertsSpec, LayerSpec, ModelConfig, NormNames
from eyas.engine.checkpoint.rope import NO_ROPE
from eyas.engine.models import keys, mamba
from eyas.engine.states.shape import SelectiveShape

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 262_144,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
}
"""What a config.json may leave out."""

RENAMED = (
    (".mamba.", ".linear_attn."),
    (".feed_forward.router.", ".mlp.gate."),
    (".feed_forward.", ".mlp."),
    ("model.final_layernorm.", "model.norm."),
)


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """The model of a config.json. Where `num_experts` is 1 there are no routers."""
    raw = DEFAULTS | {name: value for name, value in raw.items() if value is not None}
    if values.switch(raw, "mamba_proj_bias", False):
        raise ConfigError(f"config.json of {folder}: mamba_proj_bias is not supported")
    dense, states = keys.feed_forward(raw), _states(raw)
    experts = dense
    if values.whole(raw, "num_experts", least=1, most=keys.MOST_HEADS) > 1:
        experts = ExpertsSpec(
            width=dense.width,
            activation=dense.activation,
            experts=values.whole(raw, "num_experts"),
            per_row=values.whole(raw, "num_experts_per_tok"),
            scores="softmax",
            normalised=False,
        )
    plain = LayerSpec(keys.attention(raw, NO_ROPE), dense, NormNames(before_feed_forward="pre_ff_layernorm"))
    layers = [
        dataclasses.replace(
            plain,
            feed_forward=experts if _is_nth(raw, "expert_layer", number) else dense,
            delta=None if _is_nth(raw, "attn_layer", number) else states,
        )
        for number in range(keys.count(raw))
    ]
    return dataclasses.replace(keys.decoder(raw, folder, layers), renamed=RENAMED)


def _is_nth(raw: values.Raw, name: str, number: int) -> bool:
    """Whether a layer is of those that stand `NAME_period` apart, from number `NAME_offset` on."""
    period = values.whole(raw, f"{name}_period", least=1)
    return number % period == values.whole(raw, f"{name}_offset")


def _states(raw: values.Raw) -> SelectiveShape:
    named = {
        "state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "expand": "mamba_expand",
        "time_step_rank": "mamba_dt_rank",
        "use_conv_bias": "mamba_conv_bias",
    }
    shape = mamba.shape(
        {"hidden_size": raw["hidden_size"]} | {name: raw.get(there) for name, there in named.items()}
    )
    return dataclasses.replace(shape, norms="gains")
