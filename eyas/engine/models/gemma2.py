"""Gemma 2: norms around both halves with gains stored less one, GeGLU, scaled embeddings, soft caps.

Every other layer has a window, the first one included.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import AttentionSpec, LayerSpec, ModelConfig, NormNames
from eyas.engine.models import keys

NORMS = NormNames(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)

DEFAULTS = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "sliding_window": 4096,
}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """The model of a config.json. Keys that it leaves out are `DEFAULTS`."""
    raw = DEFAULTS | dict(raw)
    attention = scaled(raw, keys.attention(raw))
    windows = keys.layer_windows(raw, [layer % 2 == 0 for layer in range(keys.count(raw))])
    return decoder(raw, folder, [dataclasses.replace(attention, window=each) for each in windows])


def scaled(raw: values.Raw, attention: AttentionSpec) -> AttentionSpec:
    """The attention with Gemma's scale of scores, their cap and, if it says so, biases."""
    bias = values.switch(raw, "attention_bias", False)
    return dataclasses.replace(
        attention,
        scale=_scale(raw),
        soft_cap=values.number(raw, "attn_logit_softcapping", 0.0),
        qkv_bias=bias,
        output_bias=bias,
    )


def _scale(raw: values.Raw) -> float:
    scalar = values.number(raw, "query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        raise ValueError(f"query_pre_attn_scalar {scalar} must be above 0")
    return float(scalar**-0.5)


def decoder(raw: values.Raw, folder: Path, attentions: list[AttentionSpec]) -> ModelConfig:
    """The decoder that all Gemmas have in common, around each layer's attention."""
    if raw.get("use_bidirectional_attention"):
        raise ConfigError(f"config.json of {folder}: use_bidirectional_attention of a Gemma is not supported")
    feed_forward = keys.feed_forward(raw, activation(raw))
    layers = [LayerSpec(attention, feed_forward, NORMS) for attention in attentions]
    plain = keys.decoder(raw, folder, layers, tied=True)
    return dataclasses.replace(
        plain,
        norm_offset=1.0,
        embedding_scale=plain.hidden_size**0.5,
        logit_soft_cap=values.number(raw, "final_logit_softcapping", 0.0),
    )


def activation(raw: values.Raw) -> str:
    """The activation that `hidden_activation` names, as it stands there."""
    stated = raw.get("hidden_activation")
    return "gelu_pytorch_tanh" if stated is None else stated
