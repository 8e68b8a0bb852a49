"""Falcon (7B, 40B, 180B and 11B): halves of a layer side by side, no gates, q, k and v stored by heads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig, NormNames
from eyas.engine.models import cohere, keys

RENAMED = (
    ("transformer.h.", "model.layers."),
    ("transformer.word_embeddings.", "model.embed_tokens."),
    ("transformer.ln_f.", "model.norm."),
    (".self_attention.dense.", ".self_attn.o_proj."),
    (".self_attention.", ".self_attn."),
    (".mlp.dense_h_to_4h.", ".mlp.up_proj."),
    (".mlp.dense_4h_to_h.", ".mlp.down_proj."),
)
TWO_NORMS = NormNames(before_attention="ln_attn", before_feed_forward="ln_mlp")
DEFAULTS = {
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "layer_norm_epsilon": 1e-5,
    "activation": "gelu",
}
"""What published configurations may leave out."""


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`new_decoder_architecture` has groups of heads and, by `num_ln_in_parallel_attn`, two norms; else there
    is one key head by `multi_query`, and halves stand one behind the other without `parallel_attn`.
    """
    if values.switch(raw, "alibi", False):
        raise ConfigError(f"config.json of {folder}: alibi of a Falcon is not supported")
    raw = DEFAULTS | {name: value for name, value in raw.items() if value is not None}
    newer, beside = values.switch(raw, "new_decoder_architecture", False), True
    heads = values.whole(raw, "num_attention_heads", least=1, most=keys.MOST_HEADS)
    groups = values.whole(raw, "num_kv_heads", heads, least=1, most=keys.MOST_HEADS)
    norms = TWO_NORMS if newer and values.whole(raw, "num_ln_in_parallel_attn", 2) == 2 else cohere.NORMS
    if not newer:
        beside = values.switch(raw, "parallel_attn", True)
        groups = 1 if values.switch(raw, "multi_query", True) else heads
        norms = norms if beside else NormNames()
    hidden = keys.width_of(raw, "hidden_size")
    raw = raw | {
        "num_key_value_heads": groups,
        "head_dim": None,
        "intermediate_size": values.whole(raw, "ffn_hidden_size", 4 * hidden, most=keys.MOST_COLUMNS),
        "hidden_act": raw["activation"],
        "rms_norm_eps": raw["layer_norm_epsilon"],
    }
    bias = values.switch(raw, "bias", False)
    attention = dataclasses.replace(keys.attention(raw), qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(attention, keys.plain_feed_forward(raw, bias=bias), norms, parallel=beside)
    plain = keys.decoder(raw, folder, [layer] * keys.count(raw), tied=True)
    qkv = keys.qkv_by_heads("query_key_value", attention)
    return dataclasses.replace(plain, centred=True, norm_bias=True, renamed=RENAMED, fused=(qkv,))
