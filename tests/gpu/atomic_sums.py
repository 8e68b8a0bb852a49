"""A product whose stretches of k are added up as they come, by atomics: what exact arithmetic must not do."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.products import exact_wide
from eyas.engine.kernels.products.skinny import ProductLaunch

STRETCHES = 16
_ROWS, _COLUMNS, _K = 64, 64, 64


@triton.jit
def _stretch(x, weight, out, m, n, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    stretch = tl.cdiv(k, tl.num_programs(2))
    first = tl.program_id(2) * stretch
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, first + stretch, K):
        inside = start + tl.arange(0, K)
        there = inside < tl.minimum(first + stretch, k)
        a = tl.load(x + rows[:, None] * k + inside, mask=(rows < m)[:, None] & there, other=0.0)
        b = tl.load(weight + columns[:, None] * k + inside, mask=(columns < n)[:, None] & there, other=0.0)
        total = tl.dot(a, tl.trans(b), total)
    inside = (rows < m)[:, None] & (columns < n)
    tl.atomic_add(out + rows[:, None] * n + columns, total, mask=inside)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [m, k] . weight [n, k]^T -> [m, n], rounded once to x's type."""
    (m, k), n = x.shape, weight.shape[0]
    out = x.new_zeros(m, n, dtype=torch.float32)
    grid = (triton.cdiv(m, _ROWS), triton.cdiv(n, _COLUMNS), STRETCHES)
    _stretch[grid](x.contiguous(), weight, out, m, n, k, ROWS=_ROWS, COLUMNS=_COLUMNS, K=_K)
    return out.to(x.dtype)


def instead() -> SimpleNamespace:
    """`exact_wide` with the products that are added to the residual added up by atomics."""

    def shares(
        x: torch.Tensor, weight: torch.Tensor, launch: ProductLaunch, kind: str = "linear", span: int = 0
    ) -> torch.Tensor:
        linear = kind == "linear"
        return product(x, weight) if linear else exact_wide.shares(x, weight, launch, kind, span)

    return SimpleNamespace(**vars(exact_wide) | {"shares": shares})
