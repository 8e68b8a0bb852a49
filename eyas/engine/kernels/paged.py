"""Where the rows of a sequence lie in the paged pool, as kernels see it.

This file knows pages, page tables and strides. It knows neither attention nor the owner of a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class PagedKv:
    """One layer of a pool, and the page tables that lead to its rows.

    `pool` [pages, 2 (K, V), page_size, kv_heads, dim] is one layer's view of the page-major pool: contiguous
    except between pages. `tables` int32 [slots, most pages] holds physical pages; unused entries are 0.
    """

    pool: torch.Tensor
    tables: torch.Tensor

    @property
    def page_size(self) -> int:
        """Rows per page."""
        return self.pool.shape[2]

    @property
    def kv_heads(self) -> int:
        """Key and value heads on this rank."""
        return self.pool.shape[3]

    @property
    def dim(self) -> int:
        """Values per head."""
        return self.pool.shape[4]

    @property
    def values(self) -> torch.Tensor:
        """The same view, starting at the first value row."""
        return self.pool[:, 1]


@triton.jit
def pages_of(table, rows, end, PAGE: tl.constexpr):
    """The pages, int64 [n, 1], of logical `rows` int32 [n]. Rows from `end` on get page 0."""
    return tl.load(table + rows // PAGE, mask=rows < end, other=0).to(tl.int64)[:, None]
