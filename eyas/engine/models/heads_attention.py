"""Grouped-query attention: queries, keys and values of heads, rotated. How its tensors are loaded, and its
equation over the verbs of `ops`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Generic

import torch

from eyas.engine.checkpoint.config import AttentionSpec, ModelConfig
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import ProjectionT
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products import skinny
from eyas.engine.layers.norm import Gain, load_gain
from eyas.engine.layers.rotary import head_order, temperatures
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.ops.machine import Blocks
from eyas.engine.models.ops.parts import QkvPart


class HeadsAttention(Generic[ProjectionT]):
    """A `Mixer`, whose tensors are those below `prefix`. `gain`: as of `DecoderLayer`."""

    def __init__(
        self,
        blocks: Blocks[ProjectionT],
        spec: AttentionSpec,
        prefix: str,
        gain: Gain | None,
    ) -> None:
        config, weights = blocks.config, blocks.weights
        placement, dim, own = weights.placement, spec.head_dim, _stored_heads(spec)
        counts = {"q": spec.num_heads * dim * (1 + spec.gated), "k": own * dim, "v": own * dim}
        if not own:
            counts = {"q": counts["q"]}
        names = [f"{prefix}.{'k' if part == 'v' and spec.keys_as_values else part}_proj" for part in counts]
        width = config.hidden_size if gain is None else gain.shape[0]
        matrices = [f"{n}.weight" for n in names]
        heads, kv_heads = spec.num_heads // placement.ranks, own // placement.ranks
        order = rows_order(spec, heads, kv_heads)
        qkv = blocks.loader(matrices).rows(matrices, list(counts.values()), width)
        if order is not None:
            qkv = qkv.in_order(order)
        bias = norms = row_gains = centred = None
        if spec.qkv_bias:
            pairs = zip(names, counts.values(), strict=True)
            bias = torch.cat([weights.take_rows(f"{n}.bias", (c,)) for n, c in pairs])
            bias = bias if order is None else bias[order.to(bias.device)]
        query_gain = places = None
        ones = torch.ones(dim, dtype=placement.dtype, device=placement.device)
        if spec.head_norms:
            gains = torch.stack(query_key_gains(config, spec, weights, prefix))
            if spec.norms_behind:  # what keys would be multiplied by, queries are
                query_gain, gains = gains.float().prod(0), torch.ones_like(gains)
            norms = skinny.HeadNorms(gains, config.norm_eps)
        if spec.bare_norms:
            norms = skinny.HeadNorms(torch.stack((ones, ones)), config.norm_eps)
        if spec.temper is not None:
            places = temperatures(spec.temper, config.context_length).to(placement.device)
        if spec.row_norms:
            row_gains = query_key_gains(config, spec, weights, prefix)
        if spec.centred_heads:
            centred = centred_gains(spec, weights, prefix)
        self._shared_from = spec.shared_from
        self.norm = None if gain is None else blocks.norm_before(gain, qkv)
        shape = row_kernels.HeadLayout(heads, kv_heads, dim, norms)
        sinks = weights.take_rows(f"{prefix}.sinks", (spec.num_heads,)).float() if spec.sinks else None
        scores = ScoreScaling.of(spec, sinks)
        self._qkv = QkvPart(qkv, spec, shape, scores, bias, row_gains, query_gain, places, centred)
        if spec.value_norms or config.uneven_heads:
            value_gain = ones if spec.value_norms else None
            pool = (spec.num_kv_heads // placement.ranks, dim) if config.uneven_heads else None
            self._qkv = replace(self._qkv, value_gain=value_gain, stored=pool)

    @property
    def projections(self) -> tuple[ProjectionT, ...]:
        """Its weights."""
        return (self._qkv.projection,)

    def attend(self, read: Any, layer: int, ops: Ops[Any, Any, Any]) -> torch.Tensor:
        """-> what every query has attended to, [m, heads * dim]."""
        gates = None
        if self._qkv.spec.gated:
            q, gates = ops.gated_qkv(read, self._qkv, layer)
        else:
            q = ops.qkv(read, self._qkv, layer)
        q = ops.weighed(q, self._qkv)
        mixed = ops.attend(q, self._qkv, layer if self._shared_from is None else self._shared_from)
        return mixed if gates is None else ops.let_through(mixed, gates)

    def keep(self, read: Any, layer: int, ops: Ops[Any, Any, Any]) -> None:
        """Writes keys and values, if it has some."""
        if self._qkv.spec.gated:
            ops.gated_qkv(read, self._qkv, layer)
        else:
            ops.qkv(read, self._qkv, layer)


def _stored_heads(spec: AttentionSpec) -> int:
    """The key and value heads that it has itself."""
    return spec.num_kv_heads if spec.shared_from is None else 0


def rows_order(spec: AttentionSpec, heads: int, kv_heads: int) -> torch.Tensor | None:
    """The stored row of each row of q, k and v, one below the other: int64 [(heads + 2 kv_heads) * dim];
    behind them those of gates, which are stored head by head below each query.

    None: they are stored in the order that attention needs.
    """
    dim = spec.head_dim
    if spec.gated:
        queries = torch.arange(2 * heads * dim).view(heads, 2, dim)
        keys, values = torch.arange(2 * heads * dim, 2 * (heads + kv_heads) * dim).view(2, kv_heads, dim)
        order = head_order(spec.rope, dim, spec.adjacent)
        parts = (queries[:, 0, order], keys[:, order], values, queries[:, 1])
        return torch.cat([part.flatten() for part in parts])
    if spec.rope.rotated(dim) == dim and not spec.adjacent:
        return None
    rows = torch.arange((heads + 2 * kv_heads) * dim).view(-1, dim)
    order = head_order(spec.rope, dim, spec.adjacent)
    return torch.cat((rows[: heads + kv_heads, order], rows[heads + kv_heads :])).flatten()


def query_key_gains(
    config: ModelConfig, spec: AttentionSpec, weights: WeightSource, prefix: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gains of the norms of q and of k: [dim] for each head, or [heads, dim] for all heads as one row.
    Where there are no keys, those of q are both.
    """
    counts = (spec.num_heads, spec.num_kv_heads) if spec.row_norms else (1, 1)
    names = [f"{prefix}.{part}_norm.weight" for part in ("qk" if _stored_heads(spec) else "qq")]
    stored = [load_gain(config, weights, n, c * spec.head_dim) for n, c in zip(names, counts, strict=True)]
    order = head_order(spec.rope, spec.head_dim, spec.adjacent).to(stored[0].device)
    q, k = (gain.view(count, -1)[:, order] for gain, count in zip(stored, counts, strict=True))
    return (q, k) if spec.row_norms else (q[0], k[0])


def centred_gains(
    spec: AttentionSpec, weights: WeightSource, prefix: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gains of this rank's heads of q and of k, float32 [heads, dim] each."""
    order = head_order(spec.rope, spec.head_dim, spec.adjacent).to(weights.placement.device)
    shapes = {"q": (spec.num_heads, spec.head_dim), "k": (spec.num_kv_heads, spec.head_dim)}
    q, k = (weights.take_rows(f"{prefix}.{part}_norm.weight", shape) for part, shape in shapes.items())
    return q[:, order].float(), k[:, order].float()
