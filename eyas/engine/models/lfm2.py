"""LFM2, alone or in a checkpoint that reads images too: most layers have a short convolution, the others
attend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import FeedForwardSpec, LayerSpec, ModelConfig, NormNames
from eyas.engine.models import keys
from eyas.engine.states.shape import ConvolutionShape

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "conv_L_cache": 3,
}
"""What a config.json may leave out."""

KINDS = ("conv", "full_attention")
RENAMED = (
    *keys.TEXT_NAMES,
    (".conv.conv.", ".linear_attn.conv."),
    (".conv.in_proj.", ".linear_attn.in_proj."),
    (".conv.out_proj.", ".linear_attn.out_proj."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".q_layernorm.", ".q_norm."),
    (".k_layernorm.", ".k_norm."),
    (".feed_forward.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
    ("model.embedding_norm.", "model.norm."),
)


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """The width of feed-forwards is computed of the one that is stated, unless
    `block_auto_adjust_ff_dim` is off.
    """
    raw = DEFAULTS | dict(keys.text_of(raw))
    stated = keys.width_of(raw, "block_ff_dim" if "block_ff_dim" in raw else "intermediate_size")
    part = keys.feed_forward(raw | {"intermediate_size": _adjusted(raw, stated)}, "silu")
    return decoder(raw, folder, [part] * keys.count(raw))


def decoder(raw: values.Raw, folder: Path, parts: Sequence[FeedForwardSpec]) -> ModelConfig:
    """The layers with these feed-forwards; `raw`: with `DEFAULTS`."""
    tied = values.switch(raw, "tie_embedding", values.switch(raw, "tie_word_embeddings", True))
    raw = dict(raw) | {"rms_norm_eps": raw["norm_eps"], "tie_word_embeddings": tied}
    if values.switch(raw, "conv_bias", False):
        raise ConfigError(f"config.json of {folder}: conv_bias is not supported")
    attention = dataclasses.replace(keys.attention(raw), head_norms=True)
    norms = NormNames("operator_norm", before_feed_forward="ffn_norm")
    shape = ConvolutionShape.of_columns(
        keys.width_of(raw, "hidden_size"), values.whole(raw, "conv_L_cache", least=1)
    )
    layers = [
        LayerSpec(attention, part, norms, delta=shape if kind == KINDS[0] else None)
        for part, kind in zip(parts, _kinds(raw, len(parts)), strict=True)
    ]
    return dataclasses.replace(keys.decoder(raw, folder, layers), renamed=RENAMED)


def _kinds(raw: values.Raw, count: int) -> Sequence[str]:
    """The kind of each layer: by `layer_types`, or by the numbers of those that attend."""
    kinds: Sequence[str] = values.words(raw, "layer_types")
    if not kinds:
        attends = values.wholes(raw, "full_attn_idxs")
        kinds = [KINDS[i in attends] for i in range(count)]
    if len(kinds) != count or set(kinds) - set(KINDS):
        raise ConfigError(f"layer_types {values.said(kinds)} are not {' or '.join(KINDS)} for each layer")
    return kinds


def _adjusted(raw: values.Raw, stated: int) -> int:
    """Two thirds of it, times `block_ffn_dim_multiplier`, up to a multiple of `block_multiple_of`."""
    if not values.switch(raw, "block_auto_adjust_ff_dim", True):
        return stated
    width = 2 * stated // 3
    if raw.get("block_ffn_dim_multiplier", 1.0) is None:
        return width
    width = int(values.number(raw, "block_ffn_dim_multiplier", 1.0) * width)
    multiple = values.whole(raw, "block_multiple_of", 256, least=1)
    return -(-width // multiple) * multiple
