"""OPT: stored positions instead of a rotation, norms that take off the mean, no gates."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig, NormNames
from eyas.engine.checkpoint.rope import NO_ROPE
from eyas.engine.models import keys

RENAMED = (
    ("model.decoder.final_layer_norm.", "model.norm."),
    ("model.decoder.", "model."),
    (".out_proj.", ".o_proj."),
    (".fc1.", ".mlp.up_proj."),
    (".fc2.", ".mlp.down_proj."),
)
NORMS = NormNames(before_attention="self_attn_layer_norm", before_feed_forward="final_layer_norm")
OFFSET = 2
"""Rows of the table before that of the first position."""

ALIKE = {
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "layer_norm_elementwise_affine": True,
}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`enable_bias` stands for biases of all products. The 350M model, whose norms are behind, is refused."""
    width = values.whole(raw, "word_embed_proj_dim", keys.width_of(raw, "hidden_size"))
    odd = [name for name, usual in ALIKE.items() if values.switch(raw, name, usual) != usual]
    if odd or width != keys.width_of(raw, "hidden_size"):
        name = next(iter(odd), "word_embed_proj_dim")
        raise ConfigError(
            f"config.json of {folder}: {name} {values.said(raw.get(name))} of an OPT is not supported"
        )
    act = raw.get("activation_function") or "relu"
    raw = dict(raw) | {"rms_norm_eps": 1e-5, "intermediate_size": raw["ffn_dim"], "hidden_act": act}
    bias = values.switch(raw, "enable_bias", True)
    attention = dataclasses.replace(keys.attention(raw, NO_ROPE), qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(attention, keys.plain_feed_forward(raw, bias=bias), NORMS)
    plain = keys.decoder(raw, folder, [layer] * keys.count(raw), tied=True)
    return dataclasses.replace(
        plain,
        centred=True,
        norm_bias=True,
        positions=plain.context_length + OFFSET,
        position_offset=OFFSET,
        renamed=RENAMED,
    )
