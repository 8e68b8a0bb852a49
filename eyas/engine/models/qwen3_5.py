"""Qwen3.5, dense, alone or in a checkpoint that also reads images: the layers of a Qwen3-Next."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.checkpoint.fused_tensors import FusedTensor
from eyas.engine.checkpoint.stacked_tensors import JoinedTensor
from eyas.engine.models import keys, qwen2_vl, qwen3_next
from eyas.engine.states.shape import DeltaShape

DEFAULTS = qwen3_next.DEFAULTS | {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
"""What a `text_config` may leave out."""


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Rows of q, k and v are stored as one, by parts."""
    text = qwen2_vl.text(keys.tied_in_either(raw), DEFAULTS)
    layer = LayerSpec(qwen3_next.attention(text), keys.feed_forward(text))
    plain = qwen3_next.hybrid(text, folder, [layer] * keys.count(text))
    return dataclasses.replace(plain, renamed=keys.TEXT_NAMES, fused=joined(qwen3_next.delta(text)))


def joined(shape: DeltaShape) -> tuple[JoinedTensor, ...]:
    """The tensors of a layer with a state that are several."""
    sizes = shape.key_heads * shape.key_size, shape.value_heads * shape.value_size
    qkv = (("in_proj_q", sizes[0]), ("in_proj_k", sizes[0]), ("in_proj_v", sizes[1]))
    return FusedTensor("in_proj_qkv", qkv), qwen3_next.convolution(shape)
