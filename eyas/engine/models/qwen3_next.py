"""Qwen3-Next: three of four layers with a state of the gated delta rule; the others' heads have a gate each.
Qwen2's experts with a shared one, and norms whose stored gains are less 1.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import AttentionSpec, LayerSpec, ModelConfig
from eyas.engine.checkpoint.fused_tensors import FusedTensor
from eyas.engine.checkpoint.transposed_tensors import GroupsTensor
from eyas.engine.models import keys, qwen2_moe, qwen3_moe
from eyas.engine.states.shape import DeltaShape

DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "norm_topk_prob": True,
}
"""What a config.json may leave out."""

KINDS = ("linear_attention", "full_attention")


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Rows of q, k, v and the gate are stored by key heads, and so are those of a row's two numbers."""
    raw = DEFAULTS | dict(raw)
    shape = delta(raw)
    plain = hybrid(raw, folder, qwen3_moe.layers(raw, attention(raw), qwen2_moe.experts(raw)))
    each = shape.value_heads // max(shape.key_heads, 1)
    rows = {
        "q": shape.key_size,
        "k": shape.key_size,
        "v": each * shape.value_size,
        "z": each * shape.value_size,
    }
    fused = (
        GroupsTensor("in_proj_qkvz", shape.key_heads, _named(rows)),
        GroupsTensor("in_proj_ba", shape.key_heads, _named({"b": each, "a": each})),
        convolution(shape),
    )
    return dataclasses.replace(plain, renamed=qwen2_moe.RENAMED, fused=fused)


def attention(raw: values.Raw) -> AttentionSpec:
    """`attention_bias` stands for biases of q, k, v and o."""
    return dataclasses.replace(
        keys.biased(raw, "attention_bias", keys.attention(raw)), head_norms=True, gated=True
    )


def hybrid(raw: values.Raw, folder: Path, layers: list[LayerSpec]) -> ModelConfig:
    """The decoder of these layers, of which some have a state."""
    shape = delta(raw)
    made = [
        dataclasses.replace(layer, delta=shape if recurs else None)
        for layer, recurs in zip(layers, recurring(raw), strict=True)
    ]
    return dataclasses.replace(keys.decoder(raw, folder, made), norm_offset=1.0)


def recurring(raw: values.Raw) -> list[bool]:
    """Which layers have a state: as `layer_types` says, or all but every `full_attention_interval`-th."""
    count, interval = keys.count(raw), values.whole(raw, "full_attention_interval", 4, least=1)
    kinds = values.words(raw, "layer_types") or [
        KINDS[(number + 1) % interval == 0] for number in range(count)
    ]
    if len(kinds) != count or set(kinds) - set(KINDS):
        raise ConfigError(f"layer_types {values.said(kinds)} are not {' or '.join(KINDS)} for each layer")
    return [kind == KINDS[0] for kind in kinds]


def delta(raw: values.Raw) -> DeltaShape:
    """The shape of the states."""
    return DeltaShape(
        key_heads=values.whole(raw, "linear_num_key_heads", least=1, most=keys.MOST_HEADS),
        value_heads=values.whole(raw, "linear_num_value_heads", least=1, most=keys.MOST_HEADS),
        key_size=values.whole(raw, "linear_key_head_dim", least=1, most=keys.MOST_HEADS),
        value_size=values.whole(raw, "linear_value_head_dim", least=1, most=keys.MOST_HEADS),
        kernel=values.whole(raw, "linear_conv_kernel_dim", least=1),
    )


def convolution(shape: DeltaShape) -> FusedTensor:
    """The tensor of the convolution's factors: of q, k and v."""
    sizes = shape.key_heads * shape.key_size, shape.value_heads * shape.value_size
    return FusedTensor("conv1d", (("conv_q", sizes[0]), ("conv_k", sizes[0]), ("conv_v", sizes[1])))


def _named(rows: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((f"in_proj_{part}", count) for part, count in rows.items())
