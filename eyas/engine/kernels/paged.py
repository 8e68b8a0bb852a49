"""Where a sequence's rows lie in the paged pool, as kernels see it.

It knows pages, page tables and strides; it knows nothing of attention, nor of who owns a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class PagedKv:
    """One layer of a pool, and the page tables that lead to its rows.

    `pool` [pages, 2 (K, V), page_size, kv_heads, dim] is strided between pages only (a layer's view of the
    page-major pool); `tables` int32 [slots, most pages] holds physical pages, zeros where there is none.
    """

    pool: torch.Tensor
    tables: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.pool.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.pool.shape[3]

    @property
    def dim(self) -> int:
        return self.pool.shape[4]

    @property
    def values(self) -> torch.Tensor:
        """The same view, beginning at the first value row."""
        return self.pool[:, 1]


@triton.jit
def pages_of(table, rows, end, PAGE: tl.constexpr):
    """The pages int64 [n, 1] of logical `rows` int32 [n]; page 0 stands in from row `end` on."""
    return tl.load(table + rows // PAGE, mask=rows < end, other=0).to(tl.int64)[:, None]
