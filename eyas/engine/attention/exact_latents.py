"""Attention of a device step's rows over latents by the exact arithmetic: all have one form and one order.

As `latent.PagedLatents`, for a target: prompts are absorbed too, since their expanded form has other sums.
"""

from __future__ import annotations

import torch

from eyas.engine.attention.latent_heads import LatentHeads
from eyas.engine.attention.rows import RowLimits
from eyas.engine.batch.rows import ForwardRows
from eyas.engine.kernels.attention.attend import QueryRows
from eyas.engine.kernels.attention.exact_attend import ExactLaunch
from eyas.engine.kernels.attention.paged import PagedKv
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kernels.latent.exact_latents import (
    MOST_SHARED,
    attend_latent_chunks_exactly,
    attend_latents_exactly,
)
from eyas.engine.kernels.latent.latent_products import absorb, values
from eyas.engine.kernels.products.skinny import empty_padded
from eyas.engine.kv.pool import PoolShape


class ExactLatents:
    """Exact latent attention of `heads` query heads over the sequences of `tables` int32 [slots,
    most pages].
    """

    def __init__(
        self, tables: torch.Tensor, heads: int, shape: PoolShape, most: RowLimits, *, pdl: bool
    ) -> None:
        self.tables, self._latent, self._pdl = tables, shape.format.latent, pdl
        sample = torch.empty(1, *shape.sizes[2:], dtype=shape.dtype, device=shape.device)
        kv, queries = PagedKv(sample, tables), most.batch * most.width
        self._launch = ExactLaunch.on(kv, heads, queries, pdl, shared=MOST_SHARED)

    def __call__(
        self, q: torch.Tensor, layer: torch.Tensor, rows: ForwardRows, scores: ScoreScaling
    ) -> torch.Tensor:
        """Attends the rows, as `PagedLatents` does."""
        assert isinstance(scores, LatentHeads)
        kv, first = PagedKv(layer, self.tables, scores, rows.firsts), 0
        absorbed = absorb(q, scores.keys, scores.rotation, self._pdl, exact=True)
        mixed = absorbed.new_zeros(*absorbed.shape[:2], self._latent)
        for group in rows.groups:
            queries = QueryRows(group.slots, group.starts, group.width, group.mask, group.extent or None)
            own = slice(first, first + group.rows)
            attend_latents_exactly(absorbed[own], kv, queries, self._launch, mixed[own])
            first += group.rows
        if rows.tiles is not None:
            attend_latent_chunks_exactly(absorbed[first:], kv, rows.tiles, mixed[first:])
        out = empty_padded(q.shape[0], scores.values.shape[0] * scores.values.shape[1], like=q)
        values(mixed, scores.values, out, self._pdl, exact=True)
        return out
