"""GPT-2: stored positions, norms that take off the mean, no gates, matrices stored as [columns, rows]."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig, NormNames
from eyas.engine.checkpoint.rope import NO_ROPE
from eyas.engine.checkpoint.transposed_tensors import TransposedTensor
from eyas.engine.models import keys

RENAMED = (
    ("transformer.", ""),
    ("h.", "model.layers."),
    ("wte.", "model.embed_tokens."),
    ("wpe.", "model.embed_positions."),
    ("ln_f.", "model.norm."),
    (".attn.c_attn.", ".self_attn.c_attn."),
    (".attn.c_proj.", ".self_attn.o_proj."),
    (".attn.", ".self_attn."),
    (".mlp.c_fc.", ".mlp.up_proj."),
    (".mlp.c_proj.", ".mlp.down_proj."),
)
NORMS = NormNames(before_attention="ln_1", before_feed_forward="ln_2")
DEFAULTS = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}
"""What published configurations may leave out."""


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`scale_attn_weights` and `scale_attn_by_inverse_layer_idx` say how scores are scaled."""
    if values.switch(raw, "add_cross_attention", False):
        raise ConfigError(f"config.json of {folder}: add_cross_attention of a GPT-2 is not supported")
    raw = spelt(DEFAULTS | {name: value for name, value in raw.items() if value is not None})
    attention = dataclasses.replace(keys.attention(raw, NO_ROPE), qkv_bias=True, output_bias=True)
    if not values.switch(raw, "scale_attn_weights", True):
        attention = dataclasses.replace(attention, scale=1.0)
    feed_forward, by_layer = keys.plain_feed_forward(raw, bias=True), "scale_attn_by_inverse_layer_idx"
    shrinks = values.switch(raw, by_layer, False)
    layers = [
        LayerSpec(
            dataclasses.replace(attention, scale=attention.scale / (i + 1 if shrinks else 1)),
            feed_forward,
            NORMS,
        )
        for i in range(keys.count(raw))
    ]
    plain = keys.decoder(raw, folder, layers, tied=True)
    hidden, width = plain.hidden_size, feed_forward.width
    qkv = TransposedTensor("c_attn", tuple((f"{part}_proj", hidden) for part in "qkv"))
    sizes = {"o_proj": hidden, "up_proj": width, "down_proj": hidden}
    turned = (TransposedTensor(name, ((name, size),)) for name, size in sizes.items())
    return dataclasses.replace(
        plain,
        centred=True,
        norm_bias=True,
        positions=plain.context_length,
        renamed=RENAMED,
        fused=(qkv, *turned),
    )


def spelt(raw: values.Raw) -> values.Raw:
    """The keys under the names that other families have for them."""
    hidden = keys.width_of(raw, "n_embd")
    return dict(raw) | {
        "hidden_size": hidden,
        "intermediate_size": values.whole(raw, "n_inner", 4 * hidden, least=1, most=keys.MOST_COLUMNS),
        "num_hidden_layers": raw["n_layer"],
        "num_attention_heads": raw["n_head"],
        "num_key_value_heads": raw["n_head"],
        "head_dim": None,
        "max_position_embeddings": raw["n_positions"],
        "hidden_act": raw["activation_function"],
        "rms_norm_eps": raw["layer_norm_epsilon"],
    }
