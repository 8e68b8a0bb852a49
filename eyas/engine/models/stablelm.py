"""StableLM: Llama's layers with norms that take off the mean, and heads rotated in part."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig, NormNames
from eyas.engine.models import cohere, keys

DEFAULTS = {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`use_parallel_residual`: both halves of a layer are side by side behind one norm."""
    if values.switch(raw, "qk_layernorm", False):
        raise ConfigError(f"config.json of {folder}: qk_layernorm of a StableLM is not supported")
    raw = DEFAULTS | dict(raw)
    raw = raw | {"rms_norm_eps": raw["layer_norm_eps"]}
    bias, parallel = (
        values.switch(raw, "use_qkv_bias", False),
        values.switch(raw, "use_parallel_residual", False),
    )
    attention = dataclasses.replace(keys.attention(raw), qkv_bias=bias)
    norms = cohere.NORMS if parallel else NormNames()
    layer = LayerSpec(attention, keys.feed_forward(raw), norms, parallel=parallel)
    plain = keys.decoder(raw, folder, [layer] * keys.count(raw))
    return dataclasses.replace(plain, centred=True, norm_bias=True)
