"""gpt-oss: heads with sinks, windows in every other layer, and experts with biases, stored as one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ExpertsSpec, LayerSpec, ModelConfig
from eyas.engine.checkpoint.stacked_tensors import StackedTensor
from eyas.engine.models import keys

RENAMED = ((".mlp.router.", ".mlp.gate."),)

STACKED = (
    StackedTensor("experts.gate_up_proj", ("gate_proj.weight", "up_proj.weight"), True, interleaved=True),
    StackedTensor("experts.gate_up_proj_bias", ("gate_proj.bias", "up_proj.bias"), interleaved=True),
    StackedTensor("experts.down_proj", ("down_proj.weight",), transposed=True),
    StackedTensor("experts.down_proj_bias", ("down_proj.bias",)),
)

DEFAULT_THETA = 150_000.0
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Of a config.json that says nothing of it."""

LIMIT = 7.0
"""Of `clamped_swiglu` in `eyas.engine.layers.activations`."""


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Without `layer_types` every other layer has the window, from the first on.

    A softmax over the chosen is one over all whose weights are then divided by their sum.
    """
    if (limit := values.number(raw, "swiglu_limit", LIMIT)) != LIMIT:
        raise ConfigError(f"config.json of {folder}: swiglu_limit {limit:g} is not supported ({LIMIT:g} is)")
    bias = values.switch(raw, "attention_bias", True)
    raw = {"head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, **raw}
    rope = keys.read_rope(raw, keys.rope_scaling(raw) or ROPE, DEFAULT_THETA)
    attention = dataclasses.replace(keys.attention(raw, rope), qkv_bias=bias, output_bias=bias, sinks=True)
    experts = ExpertsSpec(
        width=keys.width_of(raw, "intermediate_size"),
        activation="clamped_swiglu",
        bias=True,
        experts=values.whole(raw, "num_local_experts", most=keys.MOST_HEADS),
        per_row=values.whole(raw, "num_experts_per_tok"),
        scores="softmax",
        normalised=True,
        router_bias=True,
    )
    windows = keys.layer_windows(raw, [layer % 2 == 0 for layer in range(keys.count(raw))])
    layers = [LayerSpec(dataclasses.replace(attention, window=each), experts) for each in windows]
    plain = keys.decoder(raw, folder, layers)
    return dataclasses.replace(plain, renamed=RENAMED, fused=STACKED)
