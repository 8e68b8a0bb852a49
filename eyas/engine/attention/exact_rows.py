"""Attention of a device step's rows by the exact arithmetic: rounds, trees and prompt chunks have one.

As `rows.PagedAttention`, for a target; draft heads attend by that one, since their tokens are advice. No
planned attention takes part: its kernels follow the step's shape, and come when their build has ended.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from eyas.engine.attention.beside import RoundsStream, apart
from eyas.engine.attention.rows import RowLimits
from eyas.engine.batch.rows import ForwardRows
from eyas.engine.kernels.attention.attend import QueryRows
from eyas.engine.kernels.attention.exact_attend import AttentionCut, ExactLaunch
from eyas.engine.kernels.attention.exact_paths import attend_exactly
from eyas.engine.kernels.attention.exact_prefill import attend_chunks_exactly
from eyas.engine.kernels.attention.paged import PagedKv
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kernels.products.skinny import empty_padded
from eyas.engine.kv.pool import PoolShape


class ExactAttention:
    """Exact attention of `heads` query heads over the sequences of `tables` int32 [slots, most pages]."""

    def __init__(
        self, tables: torch.Tensor, heads: int, shape: PoolShape, most: RowLimits, *, pdl: bool
    ) -> None:
        self.tables = tables
        sample = torch.empty(1, *shape.sizes[2:], dtype=shape.dtype, device=shape.device)
        kv = PagedKv(sample, tables)
        group = heads // kv.kv_heads
        shared = AttentionCut.most_shared(most.batch, most.width, group, kv.kv_heads, kv.dim)
        self._beside = RoundsStream(cuda=sample.is_cuda)
        self._launch = ExactLaunch.on(kv, heads, most.batch * most.width, pdl, shared=shared)

    def __call__(
        self, q: torch.Tensor, layer: torch.Tensor, rows: ForwardRows, scores: ScoreScaling
    ) -> torch.Tensor:
        """q [m, heads, dim] over [pages, 2, page_size, kv_heads, dim], by `scores` -> [m, heads * dim]."""
        tables = self.tables if rows.table is None else rows.table
        kv, out = PagedKv(layer, tables, scores, rows.firsts), empty_padded(*q.shape, like=q)
        first = sum(group.rows for group in rows.groups)
        if rows.tiles is None:
            self._rounds(q, kv, rows, out, self._launch)
            return out.view(q.shape[0], -1)
        chunks = partial(attend_chunks_exactly, q[first:], kv, rows.tiles, out=out[first:])
        launch = replace(self._launch, pdl=False) if apart(rows.count) else self._launch
        self._beside.run(rows.count, chunks, partial(self._rounds, q, kv, rows, out, launch))
        return out.view(q.shape[0], -1)

    def _rounds(
        self, q: torch.Tensor, kv: PagedKv, rows: ForwardRows, out: torch.Tensor, launch: ExactLaunch
    ) -> None:
        first = 0
        for group in rows.groups:
            queries = QueryRows(group.slots, group.starts, group.width, group.mask, group.extent)
            own = slice(first, first + group.rows)
            attend_exactly(q[own], kv, queries, launch, out=out[own])
            first += group.rows
