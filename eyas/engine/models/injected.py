"""Keys and values that rows of features leave in every layer of a draft head, without going through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic

import torch

from eyas.engine.checkpoint.config import AttentionSpec
from eyas.engine.formats.projection import ProjectionT
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products import skinny
from eyas.engine.layers.rotary import head_order
from eyas.engine.models.heads_attention import query_key_gains
from eyas.engine.models.layer import DecoderLayer
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.ops.machine import Blocks
from eyas.engine.models.ops.parts import QkvPart


class InjectedKv(Generic[ProjectionT]):
    """One product gives the keys and values of all layers: their matrices once more, one below the other,
    with no gain in them.
    """

    def __init__(self, blocks: Blocks[ProjectionT], layers: Sequence[DecoderLayer[ProjectionT]]) -> None:
        """`layers`: those of the head, alike in their key and value heads."""
        config, ranks = blocks.config, blocks.weights.placement.ranks
        specs = [layer.spec.attention for layer in layers]
        names = [f"layers.{i}.self_attn.{part}_proj" for i in range(len(specs)) for part in "kv"]
        counts = [spec.num_kv_heads * spec.head_dim for spec in specs for _ in "kv"]
        matrices = [f"{name}.weight" for name in names]
        order = _order(specs[0], counts[0] // ranks, len(specs))
        self._product = blocks.loader(matrices).rows(matrices, counts, config.hidden_size).in_order(order)
        self._bias = None
        if specs[0].qkv_bias:
            pairs = zip(names, counts, strict=True)
            bias = torch.cat([blocks.weights.take_rows(f"{name}.bias", (n,)) for name, n in pairs])
            self._bias = bias[order.to(bias.device)]
        self._parts = [
            _part(blocks, layer, f"layers.{i}.self_attn", specs[i].num_kv_heads // ranks)
            for i, layer in enumerate(layers)
        ]
        self._columns = 2 * counts[0] // ranks

    def store(self, features: torch.Tensor, ops: Ops[Any, Any, Any]) -> None:
        """Stores keys and values of features [R, hidden] in the pool, at the forward's rows."""
        made = ops.product(ops.given(features), self._product, self._bias)
        for layer, (own, part) in enumerate(zip(made.split(self._columns, 1), self._parts, strict=True)):
            ops.store(own, part, layer)


def _order(spec: AttentionSpec, own: int, layers: int) -> torch.Tensor:
    """The stored row of each row of k and v of all layers, `own` of each, as attention needs them."""
    keys, values = torch.arange(2 * layers * own).view(layers, 2, -1, spec.head_dim).unbind(1)
    return torch.stack((keys[..., head_order(spec.rope, spec.head_dim, spec.adjacent)], values), 1).flatten()


def _part(
    blocks: Blocks[ProjectionT], layer: DecoderLayer[ProjectionT], prefix: str, heads: int
) -> QkvPart[Any]:
    """How a layer's keys pass their norm and rotation: its own part, but without queries."""
    spec, norms = layer.spec.attention, None
    if spec.head_norms:
        gains = query_key_gains(blocks.config, spec, blocks.weights, prefix)
        norms = skinny.HeadNorms(torch.stack(gains), blocks.config.norm_eps)
    layout = row_kernels.HeadLayout(0, heads, spec.head_dim, norms)
    return QkvPart(layer.mixing[0], spec, layout, ScoreScaling.of(spec))
