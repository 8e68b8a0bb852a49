"""The cost that attention adds to a row on a CPU, from a model's numbers alone: no clock, so no noise."""

from __future__ import annotations

from eyas.engine.checkpoint.config import ExpertsSpec, FeedForwardSpec, LatentSpec, LayerSpec, ModelConfig

ATTENDED = 6.0
"""Weights in whose time a row alone attends to one element of a key or a value, which is gathered before."""


def context_of_a_row(model: ModelConfig) -> float:
    """The context, in tokens, with which a row takes twice as long as without any.

    Layers with a window count as if they attended to nothing: what they read has an end.
    """
    if model.foreign is not None:
        weights = model.foreign.elements
    else:
        weights = sum(_weights(model.hidden_size, layer) for layer in model.layers)
        weights += model.hidden_size * model.vocab_size
    read = sum(_attended(layer) for layer in model.layers)
    return weights / (ATTENDED * read) if read else float(model.context_length)


def _attended(layer: LayerSpec) -> int:
    """Elements of keys and values that a row's heads read of one token."""
    spec = layer.attention
    return (
        0 if spec.window or spec.chunk else spec.num_heads * (spec.head_dim + (spec.latent or spec.head_dim))
    )


def _weights(hidden: int, layer: LayerSpec) -> int:
    """The weights of one layer that a row meets."""
    spec = layer.attention
    if isinstance(spec, LatentSpec):
        rank, rotated = spec.query_rank, spec.rotated_dim
        per_head = (rank or hidden) * (spec.plain_dim + rotated)
        per_head += spec.kv_rank * (spec.plain_dim + spec.value_dim) + spec.value_dim * hidden
        attention = hidden * (rank + spec.kv_rank + rotated) + spec.num_heads * per_head
    else:
        own = spec.num_kv_heads if spec.shared_from is None else 0
        attention = 2 * hidden * spec.head_dim * (spec.num_heads + own)
    return attention + 3 * hidden * _width(layer.feed_forward)


def _width(spec: FeedForwardSpec) -> int:
    """The width of all feed-forwards that a row takes."""
    return spec.per_row * spec.width + spec.shared_width if isinstance(spec, ExpertsSpec) else spec.width
