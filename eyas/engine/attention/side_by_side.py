"""Prompt attention that first reads a sequence's pages into one place: where chunks are long that is little.

The kernel over pages finds every row by its page, for each tile anew; rows that lie side by side come by the
tensor memory accelerator (`eyas.engine.kernels.attention.side_by_side`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eyas.engine.attention.prompts import PromptChunk, bytes_of, chunks_of, made_up_chunk
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.kernels.attention.joined import rows_of_pages
from eyas.engine.kernels.attention.side_by_side import KEYS, attend_side_by_side
from eyas.engine.kv.pool import PoolShape

FEWEST = 1024
"""Rows of each chunk: fewer are left to the kernel over pages."""
MOST_BYTES = 1 << 28
"""Of a sequence's keys and values in one layer, which a step reads into one place."""

_HEAD_DIM = 128  # what was measured


class SideBySideAttention:
    """Causal attention of prompt chunks: `plan` once per step, then `run` for each layer of that scale."""

    def __init__(self, shape: PoolShape, scale: float) -> None:
        self._shape, self._scale = shape, scale
        self._chunks: list[PromptChunk] = []

    @staticmethod
    def takes(shape: PoolShape) -> bool:
        """True for heads of 128 in 16 bits."""
        return shape.head_dim == _HEAD_DIM and shape.dtype.itemsize == 2

    def ready(self) -> bool:
        """True: its kernels are compiled with all others."""
        return True

    def made_up(self, rows: int) -> list[QuerySpan]:
        """One new prompt, in the pool's first page alone; see `PromptPlan.made_up`."""
        if rows < FEWEST:
            return []
        return [made_up_chunk(rows, self._shape)]

    def plan(self, spans: Sequence[QuerySpan]) -> bool:
        """Lays out a step's chunks, whose query rows follow each other in the order of `spans`, without
        waiting for the device. False if one has too few rows or begins within a block of keys, or if a
        sequence has too many.
        """
        if any(span.count < FEWEST or span.start % KEYS for span in spans):
            return False
        if any(bytes_of(span, self._shape) > MOST_BYTES for span in spans):
            return False
        self._chunks = chunks_of(spans, self._shape)
        return True

    def run(self, q: torch.Tensor, layer_pool: torch.Tensor, out: torch.Tensor) -> None:
        """q [C, heads, dim] over layer_pool [pages, 2, page_size, kv_heads, dim] into out [C, heads, dim].

        The rows' own keys and values are already in the pool. C may exceed the plan's rows: those of `out`
        are left as they were.
        """
        for chunk in self._chunks:
            keys, values = rows_of_pages(layer_pool, chunk.pages, chunk.end, chunk.end)
            attend_side_by_side(q[chunk.rows], keys, values, self._scale, out[chunk.rows])
