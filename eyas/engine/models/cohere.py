"""Command-R and Aya: norms that take off the mean, and both halves of a layer side by side behind one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import AttentionSpec, LayerSpec, ModelConfig, NormNames
from eyas.engine.models import keys

NORMS = NormNames(before_attention="input_layernorm", before_feed_forward="input_layernorm")
DEFAULTS = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_theta": 500_000.0}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`use_qk_norm` stands for norms of heads. Where keys are left out they are `DEFAULTS`."""
    raw = DEFAULTS | dict(raw)
    return decoder(raw, folder, [attention(raw)] * keys.count(raw))


def attention(raw: values.Raw) -> AttentionSpec:
    """`attention_bias` stands for biases of q, k, v and o."""
    plain = keys.biased(raw, "attention_bias", keys.attention(raw))
    normed = values.switch(raw, "use_qk_norm", False)
    return dataclasses.replace(plain, adjacent=True, centred_heads=normed)


def decoder(raw: values.Raw, folder: Path, attentions: list[AttentionSpec]) -> ModelConfig:
    """The decoder that all of them have in common, around each layer's attention. A `model_max_length` is the
    context, where `max_position_embeddings` is a length of the training.
    """
    raw = dict(raw) | {"rms_norm_eps": raw["layer_norm_eps"]}
    if raw.get("model_max_length") is not None:
        raw["max_position_embeddings"] = raw["model_max_length"]
    feed_forward = keys.feed_forward(raw)
    layers = [LayerSpec(each, feed_forward, NORMS, parallel=True) for each in attentions]
    plain = keys.decoder(raw, folder, layers, tied=True)
    return dataclasses.replace(plain, centred=True, logit_scale=values.number(raw, "logit_scale"))
