"""Products of a few rows with a dense weight in FP8 blocks: weights wait in registers until rows are there.

What such a product takes is not its bytes, which kernels before it hide: it is the way from the rows to the
sum. So each program loads its weight rows, and lays them out for the matrix unit, before it waits for the
kernel that makes the rows. Its warps share k: each multiplies a stretch of it, and they add up what they have
once, at the end. `single` does this for one row without the matrix unit. Tests compare it with plain torch,
and with `grouped`, which takes any number of rows. What it computes is no `exact` arithmetic.
"""

from __future__ import annotations

import torch
import triton.language as tl

from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.kernels.products.blocks import SIDE, Fp8Rows, StoredWeight, norm_factor, squares_of

MOST_ROWS = 8  # which the matrix unit takes at once
_COLUMNS = 16  # of the result, for each program: weight rows that the matrix unit takes at once
_WARPS, _SHORT_WARPS = 8, 4
_SHORT = 2048  # of k: up to it fewer warps share it, of more programs at a time
_REGISTER_BYTES = 128 * 1024  # bytes of weights that a program's registers hold
_MOST_BYTES = 26 << 20  # of a weight: of more, most programs begin only after the rows are there


def takes(rows: int, weight: StoredWeight) -> bool:
    """True if `dense` takes this: few rows, scales by blocks, and a weight that fits into registers."""
    n, k = weight.shape
    step = SIDE * _warps(k)
    needed = _COLUMNS * cdiv(k, step) * step
    fits = needed <= _REGISTER_BYTES and n * k <= _MOST_BYTES
    by_blocks = weight.rounding is not None and weight.rounding.rows == "block"
    return rows <= MOST_ROWS and by_blocks and fits


def _warps(k: int) -> int:
    """Of a program: they share k."""
    return _WARPS if k > _SHORT else _SHORT_WARPS


def dense(x: Fp8Rows, weight: StoredWeight, pdl: bool = False) -> torch.Tensor:
    """x [m, k] . weight [n, k]^T -> [m, n] in x's type."""
    (n, k), m, warps = weight.shape, len(x.stored), _warps(weight.shape[1])
    out = x.scales.new_empty(m, n, dtype=x.dtype)
    squares, parts, eps = squares_of(x)
    _few[(cdiv(n, _COLUMNS),)](
        *(x.stored, x.scales, squares, weight.stored, weight.scales, out, m, eps),
        N=n,
        K=k,
        ROWS=MOST_ROWS,
        COLUMNS=_COLUMNS,
        SHARES=warps,
        STEPS=cdiv(k, SIDE * warps),
        PARTS=parts,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out


@kernel(do_not_specialize=["m"])
def _few(
    x, x_scales, squares, weights, scales, out, m, eps,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SHARES: tl.constexpr,
    STEPS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of columns). A share of k has STEPS blocks of 128."""
    WIDTH: tl.constexpr = (K + 127) // 128
    first = tl.program_id(0) * COLUMNS
    share = tl.arange(0, SHARES)[:, None, None]
    column = first + tl.arange(0, COLUMNS)[None, :, None]
    row = tl.arange(0, ROWS)[None, None, :]
    of_column, of_row = weights + column.to(tl.int64) * K, x + row * K
    weights_in_registers, scales_in_registers = (), ()
    for step in tl.static_range(STEPS):
        at = (share * STEPS + step) * 128 + tl.arange(0, 128)[None, None, :]
        weight = tl.load(of_column + at, mask=(column < N) & (at < K), other=0.0)
        weights_in_registers = weights_in_registers + (weight,)  # type: ignore[assignment]
        block = share * STEPS + step
        scale = tl.load(scales + first // 128 * WIDTH + block, mask=block < WIDTH, other=0.0)
        scales_in_registers = scales_in_registers + (scale,)  # type: ignore[assignment]
    after_previous(PDL)
    total = tl.zeros((SHARES, COLUMNS, ROWS), tl.float32)
    for step in tl.static_range(STEPS):
        block = share * STEPS + step
        at = block * 128 + tl.arange(0, 128)[None, :, None]
        values = tl.load(of_row + at, mask=(row < m) & (at < K), other=0.0)
        by_row = tl.load(x_scales + row * WIDTH + block, mask=(row < m) & (block < WIDTH), other=0.0)
        total += tl.dot(weights_in_registers[step], values) * (by_row * scales_in_registers[step])
    y = tl.sum(total, 0)
    if squares is not None:
        own = tl.minimum(tl.arange(0, ROWS), m - 1)
        y *= norm_factor(squares, own, eps, PARTS, K)[None, :]
    column, row = first + tl.arange(0, COLUMNS)[:, None], tl.arange(0, ROWS)[None, :]
    tl.store(out + row * N + column, y.to(out.dtype.element_ty), mask=(row < m) & (column < N))
