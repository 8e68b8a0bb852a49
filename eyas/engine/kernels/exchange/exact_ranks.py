"""The sum of what several ranks made, in the one order of the exact arithmetic, wherever it is computed.

The residual comes first, then rank 0's numbers, rank 1's and so on, in float32; the sum is rounded once. So
it has the bits of `eyas.engine.parallel.one_shot`, which takes small tensors only.
"""

from __future__ import annotations

import torch
import triton.language as tl

from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import power_of_2
from eyas.engine.kernels.products.halving import halving_sum
from eyas.engine.kernels.products.skinny import sum_group
from eyas.engine.kernels.products.skinny_kernels import SUMS_WIDTH


def add_in_order(
    shares: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
) -> None:
    """out [m, n] = residual [m, n], if there is one, + shares[0] + shares[1] ..., of shares [ranks, m, n].

    `sums` float32 [n // sum_group(n), 128] (m <= 128) receives sums of squares of the rounded rows, as
    `skinny.SkinnyInput` takes them. All are contiguous; `out` may be `residual`.
    """
    ranks, rows, width = shares.shape
    block = power_of_2(width)
    sizes = {"RANKS": ranks, "WIDTH": width, "BLOCK": block, "GROUP": sum_group(width)}
    options = {"num_warps": min(max(block // 512, 1), 16), "enable_fp_fusion": False}
    _add_in_order[(rows,)](shares, out, residual, sums, rows, **sizes, **options)


@kernel(do_not_specialize=["rows"])
def _add_in_order(
    shares, out, residual, sums, rows,
    RANKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One row."""
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = row.to(tl.int64) * WIDTH + column
    total = tl.zeros((BLOCK,), tl.float32)
    if residual is not None:
        total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(RANKS):
        share = shares + rows.to(tl.int64) * (rank * WIDTH) + at
        total += tl.load(share, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=inside)
    if sums is not None:
        GROUPS: tl.constexpr = BLOCK // GROUP
        wide, group = rounded.to(tl.float32), tl.arange(0, GROUPS)
        totals = halving_sum(tl.reshape(wide * wide, (GROUPS, GROUP)))
        tl.store(sums + group * SUMS_WIDTH + row, totals, mask=group < WIDTH // GROUP)
