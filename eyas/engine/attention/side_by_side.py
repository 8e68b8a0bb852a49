"""Prompt attention that first reads a sequence's pages into one place: where chunks are long that is little.

The kernel over pages finds every row by its page, for each tile anew; rows that lie side by side come by the
tensor memory accelerator (`eyas.engine.kernels.attention.side_by_side`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eyas.engine.batch.spans import QuerySpan
from eyas.engine.kernels.attention.joined import rows_of_pages
from eyas.engine.kernels.attention.side_by_side import KEYS, attend_side_by_side
from eyas.engine.kv.pool import PoolShape
from kv_transfer.layout import pages_for

FEWEST = 1024
"""Rows of each chunk: fewer are left to the kernel over pages."""
MOST_BYTES = 1 << 28
"""Of a sequence's keys and values in one layer, which a step reads into one place."""

_HEAD_DIM = 128  # what was measured


@dataclass(frozen=True)
class _Chunk:
    """The query rows `rows` of a step; the pages of their sequence, and where its rows end."""

    rows: slice
    pages: torch.Tensor
    end: int


class SideBySideAttention:
    """Causal attention of prompt chunks: `plan` once per step, then `run` for each layer of that scale."""

    def __init__(self, shape: PoolShape, scale: float) -> None:
        self._shape, self._scale = shape, scale
        self._chunks: list[_Chunk] = []

    @staticmethod
    def takes(shape: PoolShape) -> bool:
        """True for heads of 128 in 16 bits."""
        return shape.head_dim == _HEAD_DIM and shape.dtype.itemsize == 2

    def ready(self) -> bool:
        """True: its kernels are compiled with all others."""
        return True

    def made_up(self, rows: int) -> list[QuerySpan]:
        """As of `PromptPlan`: one new prompt, in the pool's first page alone."""
        if rows < FEWEST:
            return []
        return [QuerySpan([0] * pages_for(rows, self._shape.page_size), 0, rows)]

    def plan(self, spans: Sequence[QuerySpan]) -> bool:
        """Lays out a step's chunks, whose query rows follow each other in the order of `spans`, without
        waiting for the device. False if one has too few rows or begins within a block of keys, or if a
        sequence has too many.
        """
        shape = self._shape
        row = 2 * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
        if any(s.count < FEWEST or s.start % KEYS or (s.start + s.count) * row > MOST_BYTES for s in spans):
            return False
        lists = [np.asarray(s.pages[: pages_for(s.start + s.count, shape.page_size)]) for s in spans]
        pages = torch.from_numpy(np.concatenate(lists).astype(np.int32))
        if shape.device.startswith("cuda"):
            pages = pages.pin_memory()  # copies from plain memory would wait for the stream
        pages = pages.to(shape.device, non_blocking=True)
        self._chunks, at, page = [], 0, 0
        for span, used in zip(spans, lists, strict=True):
            own = pages[page : page + len(used)]
            self._chunks.append(_Chunk(slice(at, at + span.count), own, span.start + span.count))
            at, page = at + span.count, page + len(used)
        return True

    def run(self, q: torch.Tensor, layer_pool: torch.Tensor, out: torch.Tensor) -> None:
        """q [C, heads, dim] over layer_pool [pages, 2, page_size, kv_heads, dim] into out [C, heads, dim].

        The rows' own keys and values are already in the pool. C may exceed the plan's rows: those of `out`
        are left as they were.
        """
        for chunk in self._chunks:
            keys, values = rows_of_pages(layer_pool, chunk.pages, chunk.end, chunk.end)
            attend_side_by_side(q[chunk.rows], keys, values, self._scale, out[chunk.rows])
