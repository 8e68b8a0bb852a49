"""Models that the device path cannot run: those whose equations or sizes no kernel computes, by name.

It knows specifications and the kernels' limits as numbers; it refuses to know torch.
"""

from __future__ import annotations

from eyas.engine.checkpoint.config import (
    ApartSpec,
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    ModelConfig,
    NormNames,
)
from eyas.engine.checkpoint.quantized import FP8_SIDE
from eyas.engine.states.shape import ChannelShape, ConvolutionShape, DeltaShape, SpaceShape

HEAD_DIMS = (16, 32, 64, 128, 256, 512)
SIDE = 16
"""Of the smallest matrix instruction: all sides of a product are multiples of it."""

MOST_EXPERTS, MOST_CHOSEN = 1024, 32
"""Experts that one program chooses among, and that it chooses."""

MOST_LATENT = 512
"""Elements of a latent: the registers hold no wider results."""


def refusal(config: ModelConfig, outputs: int) -> str:
    """The part of a model, or of a rank's share of it, that no kernel computes, by name; "": there is none.

    `outputs`: rows of the output head that the rank has.
    """
    if type(config) is not ModelConfig:
        return f"a model that is a {type(config).__name__}"
    if config.foreign is not None:  # its products are not these kernels'
        if config.uneven_heads:
            return "layers that differ in the width or the number of their key and value heads"
        return next(filter(None, map(_layer_refusal, config.layers)), "")
    sizes = {"hidden_size": config.hidden_size, "vocabulary rows": outputs}
    for layer in config.layers:
        if why := _layer_refusal(layer):
            return why
        sizes["intermediate_size"] = layer.feed_forward.width
        sizes["hidden_size_per_layer_input"] = layer.token_width
        if config.quantized and config.quantized.rows == "block" and (why := _blocks_refusal(layer)):
            return why
        for name, size in sizes.items():
            if size % SIDE:
                return f"{name} {size} (a multiple of {SIDE} is needed)"
    return ""


def _layer_refusal(layer: LayerSpec) -> str:
    known: dict[str, tuple[type, ...]] = {
        "attention": (AttentionSpec, LatentSpec),
        "feed_forward": (FeedForwardSpec, ExpertsSpec, ApartSpec),
        "norms": (NormNames,),
    }
    for part, kinds in known.items():
        kind = type(getattr(layer, part))
        if kind not in kinds:
            return f"layers whose {part.replace('_', '-')} is a {kind.__name__}"
    attention, mlp = layer.attention, layer.feed_forward
    if layer.delta is not None and (why := _state_refusal(layer.delta)):
        return why
    if layer.attends and isinstance(attention, LatentSpec):
        if why := _latent_refusal(attention):
            return why
    elif layer.attends and attention.head_dim not in HEAD_DIMS:
        return f"heads of {attention.head_dim} ({', '.join(map(str, HEAD_DIMS))} are served)"
    return _experts_refusal(mlp) if isinstance(mlp, ExpertsSpec) else ""


def _state_refusal(shape: DeltaShape) -> str:
    if isinstance(shape, ConvolutionShape):
        return "" if shape.value_size % SIDE == 0 else f"convolutions of {shape.value_size} columns"
    if type(shape) not in (DeltaShape, SpaceShape, ChannelShape):
        known = "the gated delta rule, Kimi Delta Attention, Mamba-2 and short convolutions alone"
        return f"layers with {shape.kind} (GPUs have kernels for {known})"
    if shape.key_size < SIDE or shape.key_size & (shape.key_size - 1):
        return f"keys of states of {shape.key_size} elements (a power of 2, {SIDE} or more, is needed)"
    if shape.value_size % SIDE:
        return f"values of states of {shape.value_size} elements (a multiple of {SIDE} is needed)"
    rows = shape.inputs + shape.value_heads * (shape.value_size + 1 + shape.corrects) + shape.spare_rows
    if isinstance(shape, ChannelShape):
        if shape.rank % SIDE:
            return f"{shape.rank} factors of decays (a multiple of {SIDE} is needed)"
        rows = shape.inputs + shape.value_heads + 2 * shape.rank
    if rows % SIDE:
        return f"{rows} rows of the product before states (a multiple of {SIDE} is needed)"
    return ""


def _experts_refusal(spec: ExpertsSpec) -> str:
    if spec.per_row > MOST_CHOSEN or spec.experts > MOST_EXPERTS:
        return f"{spec.per_row} of {spec.experts} experts ({MOST_CHOSEN} of {MOST_EXPERTS} at most)"
    if not spec.gated:
        return "experts without gates"
    if spec.latent:
        return "experts that read a latent"
    if spec.shared_width % SIDE:
        return f"a shared expert of {spec.shared_width} columns (a multiple of {SIDE} is needed)"
    return ""


def _blocks_refusal(layer: LayerSpec) -> str:
    """Matrices that stand below each other in one product, or that ranks divide, have whole blocks."""
    attention, mlp = layer.attention, layer.feed_forward
    sizes = {"intermediate_size": mlp.width}
    if isinstance(attention, LatentSpec):
        each = attention.plain_dim + attention.rotated_dim
        sizes |= {"q_lora_rank": attention.query_rank, "rows of queries": attention.num_heads * each}
        sizes["columns of o_proj"] = attention.num_heads * attention.value_dim
        if attention.plain_dim % attention.rotated_dim or attention.rotated_dim > FP8_SIDE:
            return "rotated rows that do not lie in one FP8 block"
    else:
        reordered = attention.rope.share != 1.0 or attention.adjacent or attention.gated
        if reordered and FP8_SIDE % attention.head_dim:
            how = "rotated in part or by neighbours, or gated,"
            return f"heads of {attention.head_dim} that are {how} in FP8 blocks"
        sizes["rows of q_proj"] = attention.num_heads * attention.head_dim
        sizes["rows of k_proj"] = attention.num_kv_heads * attention.head_dim
    if isinstance(mlp, ExpertsSpec):
        sizes["columns of the shared expert"] = mlp.shared_width
    for name, size in sizes.items():
        if size % FP8_SIDE:
            return f"{name} {size} in FP8 blocks (a multiple of {FP8_SIDE} is needed)"
    return ""


def _latent_refusal(spec: LatentSpec) -> str:
    special = {
        "a window": spec.window or spec.chunk,
        "a soft cap": spec.soft_cap,
        "norms of heads": spec.head_norms,
        "sinks": spec.sinks,
    }
    if named := [name for name, there in special.items() if there]:
        return f"latent attention with {' and '.join(named)}"
    for name, size in (("kv_lora_rank", spec.kv_rank), ("qk_rope_head_dim", spec.rotated_dim)):
        if not SIDE <= size <= MOST_LATENT or size & size - 1:
            return f"{name} {size} (a power of two from {SIDE} to {MOST_LATENT} is needed)"
    sizes = {
        "q_lora_rank": spec.query_rank,
        "columns of q_b_proj": spec.num_heads * (spec.plain_dim + spec.rotated_dim),
        "columns of o_proj": spec.num_heads * spec.value_dim,
    }
    for name, size in sizes.items():
        if size % SIDE:
            return f"{name} {size} (a multiple of {SIDE} is needed)"
    return ""
