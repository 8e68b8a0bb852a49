"""Attention of a device step's rows over latents: rounds by parts of their contexts, prompt chunks by tiles.

As `eyas.engine.attention.rows` for keys and values of heads. Queries meet latents, and what is mixed of them
becomes values, here: the product that gives values adds the parts up, and chunks that are planned on the host
go another way from their queries on.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from eyas.engine.attention.latent_heads import LatentHeads
from eyas.engine.attention.latent_prompts import ExpandedPrompts
from eyas.engine.attention.rows import RowLimits
from eyas.engine.batch.rows import DecodeRows, ForwardRows
from eyas.engine.kernels.attention.attend import QueryRows
from eyas.engine.kernels.attention.paged import PagedKv
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kernels.latent.latent_attend import LatentScratch, attend_latent_chunks, attend_latents
from eyas.engine.kernels.latent.latent_products import absorb, values
from eyas.engine.kernels.products.skinny import empty_padded
from eyas.engine.kv.pool import PoolShape


class PagedLatents:
    """Latent attention of `heads` query heads over the sequences of `tables` int32 [slots, most pages].

    `prompts` attends the chunks of planned rows, all others the tile kernel does.
    """

    def __init__(
        self,
        tables: torch.Tensor,
        heads: int,
        shape: PoolShape,
        most: RowLimits,
        *,
        pdl: bool,
        prompts: ExpandedPrompts | None = None,
    ) -> None:
        self.tables = tables
        self._latent = shape.format.latent
        self._pdl = pdl
        self._prompts = prompts
        sample = torch.empty(0, dtype=shape.dtype, device=shape.device)
        self._scratch = LatentScratch.on(sample, self._latent, heads, (most.batch, most.width), pdl)

    def __call__(
        self, q: torch.Tensor, layer: torch.Tensor, rows: ForwardRows, scores: ScoreScaling
    ) -> torch.Tensor:
        """q [m, heads * (plain + rotated)], not rotated yet, strided by row at most, over [pages, 1,
        page_size, 1, width] -> [m, heads * value]. `scores`: `LatentHeads`.
        """
        assert isinstance(scores, LatentHeads)
        count = sum(group.rows for group in rows.groups)
        out = empty_padded(q.shape[0], scores.values.shape[0] * scores.values.shape[1], like=q)
        if self._prompts is not None and rows.planned and rows.firsts is None:
            self._prompts.run(q[count:], layer, scores, count, out[count:])
            if count:
                self._absorbed(q[:count], layer, replace(rows, tiles=None), scores, out)
        else:
            self._absorbed(q, layer, rows, scores, out)
        return out

    def _absorbed(
        self, q: torch.Tensor, layer: torch.Tensor, rows: ForwardRows, heads: LatentHeads, out: torch.Tensor
    ) -> None:
        """The first rows of the forward, [n, ..]: over latents."""
        kv, first = PagedKv(layer, self.tables, heads, rows.firsts), 0
        absorbed = absorb(q, heads.keys, heads.turned(slice(0, q.shape[0])), self._pdl)
        for group in rows.groups:
            own = slice(first, first + group.rows)
            parted = attend_latents(absorbed[own], kv, _queries(group), self._latent, self._scratch)
            values(parted, heads.values, out[own], self._pdl)
            first += group.rows
        if rows.tiles is not None:
            mixed = attend_latent_chunks(absorbed[first:], kv, rows.tiles, self._latent)
            values(mixed, heads.values, out[first:], self._pdl)


def _queries(group: DecodeRows) -> QueryRows:
    return QueryRows(group.slots, group.starts, group.width, group.mask, group.extent or None)
