"""Mamba and Falcon-Mamba: every layer is one half, with a state of Mamba (1), and nothing attends."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import AttentionSpec, FeedForwardSpec, LayerSpec, ModelConfig, NormNames
from eyas.engine.checkpoint.rope import NO_ROPE
from eyas.engine.models import keys
from eyas.engine.states.shape import DeltaShape, SelectiveShape

CONTEXT = 262_144
"""Tokens that a text may have where config.json says nothing: a state has no end."""

NOWHERE = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=256, rope=NO_ROPE, scale=1.0)
"""The place in pages of a model that attends nowhere: so wide that a slot of states is not too many pages."""

ENDS = (
    ("backbone.", "model."),
    ("model.embeddings.", "model.embed_tokens."),
    ("model.embedding.", "model.embed_tokens."),
    ("model.norm_f.", "model.norm."),
    (".mixer.", ".linear_attn."),
)


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Steps, keys and queries of a Falcon-Mamba pass norms without gains."""
    states = shape(raw)
    if raw["architectures"][0] == "FalconMambaForCausalLM":
        states = dataclasses.replace(states, norms="bare", norm_eps=values.number(raw, "mixer_rms_eps", 1e-6))
    if values.switch(raw, "use_bias", False):
        raise ConfigError(f"config.json of {folder}: use_bias is not supported")
    return alone(raw, folder, states, tied=True)


def alone(raw: values.Raw, folder: Path, states: DeltaShape, *, tied: bool = False) -> ModelConfig:
    """A model whose layers all have such a state, and nothing else. `tied`: as of `keys.decoder`."""
    raw = {"max_position_embeddings": CONTEXT} | dict(raw)
    raw |= {"rms_norm_eps": values.number(raw, "layer_norm_epsilon", 1e-5)}
    layer = LayerSpec(NOWHERE, FeedForwardSpec(0), NormNames(before_feed_forward=""), delta=states)
    count = keys.count(raw)
    norms = [(f"model.layers.{i}.norm.", f"model.layers.{i}.input_layernorm.") for i in range(count)]
    plain = keys.decoder(raw, folder, [layer] * count, tied=tied)
    return dataclasses.replace(plain, renamed=(*ENDS, *norms))


def shape(raw: values.Raw) -> SelectiveShape:
    """The shape of the states, of `intermediate_size` columns or by `expand`. A `time_step_rank` of "auto" is
    a 16th of the hidden ones.
    """
    raw = {name: value for name, value in raw.items() if value is not None}
    hidden = keys.width_of(raw, "hidden_size")
    if raw.get("time_step_rank", "auto") == "auto":
        raw |= {"time_step_rank": -(-hidden // 16)}
    expanded = values.whole(raw, "expand", 2, least=1, most=keys.MOST_HEADS) * hidden
    return SelectiveShape(
        key_heads=0,
        value_heads=1,
        key_size=values.whole(raw, "state_size", 16, least=1, most=keys.MOST_HEADS),
        value_size=values.whole(raw, "intermediate_size", expanded, least=1, most=keys.MOST_COLUMNS),
        kernel=values.whole(raw, "conv_kernel", 4, least=1),
        rank=values.whole(raw, "time_step_rank", least=1, most=keys.MOST_COLUMNS),
        bias=values.switch(raw, "use_conv_bias", True),
    )
