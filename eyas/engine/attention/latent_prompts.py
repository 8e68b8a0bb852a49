"""Prompt chunks over latents in the expanded form, where that is less work: keys and values are made.

`plan` lays a step's chunks out on the host and says whether it pays: a pair of query and key then costs a
third, but every row of the sequence, cached ones too, is multiplied by the heads' factors first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from eyas.engine.attention.latent_heads import LatentHeads
from eyas.engine.attention.page_lists import on_device, page_lists
from eyas.engine.attention.prompts import made_up_chunk
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import LatentSpec
from eyas.engine.kernels.latent.latent_prefill import TILE, ExpandedRows, attend_expanded
from eyas.engine.kv.pool import PoolShape, rows_at

MOST_BYTES = 1 << 29
"""Of keys and values that are made at a time: start-up leaves room for no more."""


class ExpandedPrompts:
    """Prompt attention on expanded latents, for layers that are `spec` (one rank's share) and pools of that
    shape.
    """

    def __init__(self, spec: LatentSpec, shape: PoolShape) -> None:
        self._spec, self._shape = spec, shape
        self._pages = torch.empty(0, dtype=torch.int32, device=shape.device)
        self._tiles = torch.empty(0, 4, dtype=torch.int32, device=shape.device)
        self._planned = 0

    def plan(self, spans: Sequence[QuerySpan]) -> bool:
        """Lays out a step with the prompt rows of `spans`, in order.

        False: another attention must run them.
        """
        if not spans or not self.pays(spans):
            return False
        lists = page_lists(spans, self._shape.page_size)
        tiles = [
            (query + i, min(TILE, span.count - i), span.start + i, page * self._shape.page_size)
            for span, query, page in zip(spans, lists.queries, lists.first_page, strict=False)
            for i in range(0, span.count, TILE)
        ]
        latest_first = np.array(tiles[::-1], np.int32)  # those with most keys begin first
        self._planned = sum(span.count for span in spans)
        self._pages = on_device(lists.pages, self._shape.device)
        self._tiles = on_device(latest_first, self._shape.device)
        return True

    def made_up(self, rows: int) -> list[QuerySpan]:
        """As of `PromptPlan`: a prompt in the pool's first page alone."""
        return [made_up_chunk(rows, self._shape)]

    def pays(self, spans: Sequence[QuerySpan]) -> bool:
        """True if it is less work than over latents, and what is made has room."""
        spec = self._spec
        pairs = sum(span.count * span.start + span.count * (span.count + 1) // 2 for span in spans)
        rows = sum(span.start + span.count for span in spans)
        made = spec.plain_dim + spec.value_dim
        expanded = pairs * (made + spec.rotated_dim) + rows * spec.kv_rank * made
        room = rows * spec.num_heads * made * max(self._shape.dtype.itemsize, 2) <= MOST_BYTES
        return room and expanded < pairs * (2 * spec.kv_rank + spec.rotated_dim)

    def run(
        self, q: torch.Tensor, layer: torch.Tensor, heads: LatentHeads, first: int, out: torch.Tensor
    ) -> None:
        """q [C, heads * (plain + rotated)] of the planned rows over [pages, 1, page_size, 1, width], where
        their own rows are already -> out [C, heads * value]. `first`: the first of them among the forward's.
        Rows behind the planned ones are zeros.
        """
        rows = rows_at(layer[:, 0, :, 0], self._pages, q.dtype).flatten(0, 1)
        latents, count = rows[:, : self._spec.kv_rank], self._spec.num_heads
        keys = torch.mm(latents, heads.keys.flatten(0, 1).t()).view(rows.shape[0], count, -1)
        values = torch.mm(latents, heads.values.flatten(0, 1).t()).view(rows.shape[0], count, -1)
        rotation = heads.turned(slice(first, None))
        attend_expanded(q, ExpandedRows(keys, values, rows), self._tiles, rotation, heads.factor, out)
        if self._planned < out.shape[0]:
            out[self._planned :].zero_()
