"""Attention of a device step's rows: rounds by the split-KV kernel, prompt chunks by the tile kernel.

Lengths are read on the device, from what the step's rows say; the host knows counts only. Chunks that were
planned on the host go to the attention that planned them. Where a step has both kinds the chunks run beside
the rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from eyas.engine.attention.beside import RoundsStream, apart
from eyas.engine.attention.prompts import PromptAttention
from eyas.engine.batch.rows import DecodeRows, ForwardRows
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.kernels.attention.attend import AttentionLaunch, QueryRows, attend
from eyas.engine.kernels.attention.paged import PagedKv
from eyas.engine.kernels.attention.prefill import attend_chunks, tile_rows, tiling_for
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kernels.products.skinny import empty_padded
from eyas.engine.kv.pool import PoolShape


@dataclass(frozen=True)
class RowLimits:
    """The largest batch of rounds, and the most rows of each. `kinds`: key and value heads of layers, and
    their elements, if not all are as the pool's.
    """

    batch: int
    width: int
    kinds: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, decoder: ModelConfig, batch: int, width: int) -> RowLimits:
        """The limits of all layers of a rank's share of a model."""
        return cls(batch, width, decoder.kinds_of_heads if decoder.uneven_heads else ())


class PagedAttention:
    """Attention of `heads` query heads over the sequences of `tables` int32 [slots, most pages].

    `prompts` attends the chunks of planned rows, in layers whose scores it computes; all others the tile
    kernel does.
    """

    def __init__(
        self,
        tables: torch.Tensor,
        heads: int,
        shape: PoolShape,
        most: RowLimits,
        *,
        pdl: bool,
        prompts: PromptAttention | None = None,
    ) -> None:
        self.tables = tables
        self._prompts = prompts
        self._launches: dict[tuple[int, int], AttentionLaunch] = {}
        for kind in most.kinds or (shape.sizes[4:],):
            sample = torch.empty(1, *shape.sizes[2:4], *kind, dtype=shape.dtype, device=shape.device)
            kv = PagedKv(sample, tables)
            self._launches[kind] = AttentionLaunch.on(kv, heads, most.batch, most.width, pdl)
        self._tile = max(tile_rows(heads, kv_heads) for kv_heads, _ in self._launches)
        self._beside = RoundsStream(cuda=sample.is_cuda)

    def __call__(
        self, q: torch.Tensor, layer: torch.Tensor, rows: ForwardRows, scores: ScoreScaling
    ) -> torch.Tensor:
        """q [m, heads, dim] over [pages, 2, page_size, kv_heads, dim], by `scores` -> [m, heads * dim]."""
        tables = self.tables if rows.table is None else rows.table
        kv, out = PagedKv(layer, tables, scores, rows.firsts), empty_padded(*q.shape, like=q)
        if not rows.groups:
            self._chunks(q, kv, rows, out)
        elif rows.tiles is None:
            self._groups(q, kv, rows.groups, out)
        else:
            self._both(q, kv, rows, out)
        return out.view(q.shape[0], -1)

    def _both(self, q: torch.Tensor, kv: PagedKv, rows: ForwardRows, out: torch.Tensor) -> None:
        first = sum(group.rows for group in rows.groups)
        late = apart(rows.count)
        chunks = partial(self._chunks, q[first:], kv, rows, out[first:], beside=late)
        self._beside.run(rows.count, chunks, partial(self._groups, q, kv, rows.groups, out, late=late))

    def _groups(
        self, q: torch.Tensor, kv: PagedKv, groups: list[DecodeRows], out: torch.Tensor, *, late: bool = False
    ) -> None:
        """`late`: behind all of the kernel before."""
        first, launch = 0, self._launches[kv.kv_heads, kv.dim]
        if late:
            launch = replace(launch, pdl=False)
        for group in groups:
            chain = group.together and kv.scores is not None and kv.scores.window
            mask = None if chain else group.mask
            queries = QueryRows(group.slots, group.starts, group.width, mask, group.extent)
            own = slice(first, first + group.rows)
            attend(q[own], kv, queries, launch, out=out[own])
            first += group.rows

    def _chunks(
        self, q: torch.Tensor, kv: PagedKv, rows: ForwardRows, out: torch.Tensor, *, beside: bool = False
    ) -> None:
        prompts = self._prompts if rows.planned and rows.firsts is None else None
        if prompts is not None and prompts.scores == kv.scores:
            prompts.run(q, kv.pool, out)
        elif rows.tiles is not None:
            tiling = tiling_for(kv, q.shape[1] // kv.kv_heads, self._tile, len(q), beside=beside)
            attend_chunks(q, kv, rows.tiles, tiling, out=out)
