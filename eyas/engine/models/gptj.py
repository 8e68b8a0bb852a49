"""GPT-J: both halves of a layer side by side behind one norm, heads rotated in part and by neighbours."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig, NormNames
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.models import gpt2, keys

RENAMED = (
    ("transformer.h.", "model.layers."),
    ("transformer.wte.", "model.embed_tokens."),
    ("transformer.ln_f.", "model.norm."),
    (".attn.out_proj.", ".self_attn.o_proj."),
    (".attn.", ".self_attn."),
    (".mlp.fc_in.", ".mlp.up_proj."),
    (".mlp.fc_out.", ".mlp.down_proj."),
)
NORMS = NormNames(before_attention="ln_1", before_feed_forward="ln_1")
DEFAULTS = gpt2.DEFAULTS | {
    "vocab_size": 50400,
    "n_positions": 2048,
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "rotary_dim": 64,
}
"""What published configurations may leave out."""


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`rotary_dim` elements of a head are rotated. Products of attention have no biases, all others have."""
    raw = gpt2.spelt(DEFAULTS | {name: value for name, value in raw.items() if value is not None})
    plain = keys.attention(raw, RopeConfig())
    rotated = values.whole(raw, "rotary_dim", least=2, most=plain.head_dim)
    rope = RopeConfig(share=rotated / plain.head_dim)
    attention = dataclasses.replace(plain, rope=rope, adjacent=True)
    layer = LayerSpec(attention, keys.plain_feed_forward(raw, bias=True), NORMS, parallel=True)
    config = keys.decoder(raw, folder, [layer] * keys.count(raw))
    return dataclasses.replace(config, centred=True, norm_bias=True, head_bias=True, renamed=RENAMED)
