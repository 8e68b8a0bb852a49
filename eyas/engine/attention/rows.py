"""Attention of a device step's rows: rounds by the split-KV kernel, prompt chunks by the tile kernel.

Lengths are read on the device, from what the step's rows say; the host knows counts only. Chunks that were
planned on the host go to whoever planned them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.engine.attention.prompts import PromptAttention
from eyas.engine.device.rows import Rows
from eyas.engine.kernels.attend import Launch, Queries, attend
from eyas.engine.kernels.paged import PagedKv
from eyas.engine.kernels.prefill import attend_chunks
from eyas.engine.kernels.skinny import room
from eyas.engine.kv_pool import PoolShape


@dataclass(frozen=True)
class Most:
    """The largest batch of rounds, and the most rows of each."""

    batch: int
    width: int


class PagedAttention:
    """Of `heads` query heads, over the sequences of `tables` int32 [slots, most pages].

    `prompts` attends the chunks of planned rows; without it the tile kernel does, planned or not.
    """

    def __init__(
        self,
        tables: torch.Tensor,
        heads: int,
        shape: PoolShape,
        most: Most,
        *,
        pdl: bool,
        prompts: PromptAttention | None = None,
    ) -> None:
        self._tables = tables
        self._prompts = prompts
        sample = torch.empty(1, *shape.sizes[2:], dtype=shape.dtype, device=shape.device)
        self._launch = Launch.on(PagedKv(sample, tables), heads, most.batch, most.width, pdl)

    def __call__(self, q: torch.Tensor, layer: torch.Tensor, rows: Rows) -> torch.Tensor:
        """q [m, heads, dim] over [pages, 2, page_size, kv_heads, dim] -> [m, heads * dim]."""
        paged, out, first = PagedKv(layer, self._tables), room(*q.shape, like=q), 0
        if rows.rounds is not None:
            rounds, first = rows.rounds, rows.rounds.rows
            queries = Queries(rounds.slots, rounds.starts, rounds.width, rounds.mask, rounds.extent)
            attend(q[:first], paged, queries, self._launch, out=out[:first])
        if rows.planned and self._prompts is not None:
            self._prompts.run(q[first:], layer, out[first:])
        elif rows.tiles is not None:
            attend_chunks(q[first:], paged, rows.tiles, out=out[first:])
        return out.view(q.shape[0], -1)
