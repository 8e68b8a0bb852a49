"""GPT-NeoX and Pythia: both halves of a layer side by side, each behind a norm of its own; heads rotated in
part, and q, k and v stored by heads.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.models import keys

RENAMED = (
    ("embed_out.", "lm_head."),
    ("gpt_neox.embed_in.", "model.embed_tokens."),
    ("gpt_neox.final_layer_norm.", "model.norm."),
    ("gpt_neox.", "model."),
    (".attention.dense.", ".self_attn.o_proj."),
    (".attention.", ".self_attn."),
    (".mlp.dense_h_to_4h.", ".mlp.up_proj."),
    (".mlp.dense_4h_to_h.", ".mlp.down_proj."),
)
DEFAULTS = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10_000.0,
}
"""What published configurations may leave out."""


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`rotary_pct` of a head is rotated. `attention_bias` stands for biases of q, k, v and o."""
    raw = DEFAULTS | {name: value for name, value in raw.items() if value is not None}
    same = {"partial_rotary_factor": raw["rotary_pct"], "rope_theta": raw["rotary_emb_base"]}
    plain_heads = {"num_key_value_heads": raw["num_attention_heads"], "head_dim": None}
    raw = raw | same | plain_heads | {"rms_norm_eps": raw["layer_norm_eps"]}
    bias = values.switch(raw, "attention_bias", True)
    attention = dataclasses.replace(keys.attention(raw), qkv_bias=bias, output_bias=bias)
    beside = values.switch(raw, "use_parallel_residual", True)
    layer = LayerSpec(attention, keys.plain_feed_forward(raw, bias=True), parallel=beside)
    plain = keys.decoder(raw, folder, [layer] * keys.count(raw))
    qkv = keys.qkv_by_heads("query_key_value", attention)
    return dataclasses.replace(plain, centred=True, norm_bias=True, renamed=RENAMED, fused=(qkv,))
