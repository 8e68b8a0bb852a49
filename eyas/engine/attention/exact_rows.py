"""Attention of a device step's rows by the exact arithmetic: rounds, trees and prompt chunks have one.

As `rows.PagedAttention`, for a target; draft heads attend by that one, since their tokens are advice. No
planned attention takes part: its kernels follow the step's shape, and come when their build has ended.
"""

from __future__ import annotations

import torch

from eyas.engine.attention.rows import Most
from eyas.engine.batch.rows import Rows
from eyas.engine.kernels.attend import Queries
from eyas.engine.kernels.exact_attend import ExactLaunch
from eyas.engine.kernels.exact_paths import attend_exactly
from eyas.engine.kernels.exact_prefill import attend_chunks_exactly
from eyas.engine.kernels.paged import PagedKv
from eyas.engine.kernels.scores import Scores
from eyas.engine.kernels.skinny import empty_padded
from eyas.engine.kv.pool import PoolShape


class ExactAttention:
    """Of `heads` query heads, over the sequences of `tables` int32 [slots, most pages]."""

    def __init__(self, tables: torch.Tensor, heads: int, shape: PoolShape, most: Most, *, pdl: bool) -> None:
        self._tables = tables
        sample = torch.empty(1, *shape.sizes[2:], dtype=shape.dtype, device=shape.device)
        self._launch = ExactLaunch.on(PagedKv(sample, tables), heads, most.batch * most.width, pdl)

    def __call__(self, q: torch.Tensor, layer: torch.Tensor, rows: Rows, scores: Scores) -> torch.Tensor:
        """q [m, heads, dim] over [pages, 2, page_size, kv_heads, dim], by `scores` -> [m, heads * dim]."""
        kv, out = PagedKv(layer, self._tables, scores, rows.firsts), empty_padded(*q.shape, like=q)
        first = 0
        for group in rows.groups:
            queries = Queries(group.slots, group.starts, group.width, group.mask, group.extent)
            own = slice(first, first + group.rows)
            attend_exactly(q[own], kv, queries, self._launch, out=out[own])
            first += group.rows
        if rows.tiles is not None:
            attend_chunks_exactly(q[first:], kv, rows.tiles, out=out[first:])
        return out.view(q.shape[0], -1)
