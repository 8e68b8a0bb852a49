"""Adds up a row's experts by weight, and the residual; and norms and rounds the row for what reads it in FP8.

Of few rows several programs share one. A norm multiplies a whole row by one number, which may as well
multiply what products make of it. So each program rounds its columns, times the gain, as they are, and leaves
the sum of their squares: products that read the row multiply by that number, and no program waits for others.
Of many rows each is one program's, and memory is what they take: the sum is not stored, read and stored again
by a norm. What is computed is no `exact` arithmetic.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.kernels.products.blocks import (
    SIDE,
    Fp8Rows,
    RowSquares,
    mode_of,
    quantised,
    room_for,
    rounded_row,
)
from eyas.engine.kernels.products.rows import NormInput
from eyas.engine.kernels.products.skinny import MAX_ROWS, empty_padded

_COLUMNS = 512  # of a row, that a program adds up
_WARPS = 4  # of a program that adds up a whole row


def can_round(hidden: int, norm: NormInput) -> bool:
    """Whether `combine_rounded` takes rows [m, hidden] that are read so."""
    blocks = norm.rounding is not None and norm.rounding.rows == "block" and norm.gain is not None
    return blocks and hidden % SIDE == 0


def combine_rounded(
    made: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor,
    norm: NormInput,
    pdl: bool = False,
) -> tuple[torch.Tensor, Fp8Rows]:
    """made [m * per_row, hidden], weights float32 [m, per_row], residual [m, hidden] -> their sum, rounded
    once, and its norm in FP8. Of more than 128 rows the sum takes the residual's place.
    """
    if len(residual) > MAX_ROWS:
        return residual, _combine_rows(made, weights, residual, norm, pdl)
    (m, per_row), hidden, rounding = weights.shape, made.shape[1], norm.rounding
    assert rounding is not None and norm.gain is not None
    out, rounded = empty_padded(m, hidden, like=made), room_for(residual, rounding)
    parts = cdiv(hidden, _COLUMNS)
    squares = torch.empty(m, parts, dtype=torch.float32, device=made.device)
    _combine_rounded[(m, parts)](
        *(made, weights, residual, norm.gain, out, rounded.stored, rounded.scales, squares),
        WIDTH=hidden,
        PER_ROW=per_row,
        COLUMNS=_COLUMNS,
        POWERS=rounding.powers,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out, replace(rounded, squares=RowSquares(squares, norm.eps))


def _combine_rows(
    made: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor, norm: NormInput, pdl: bool
) -> Fp8Rows:
    """Computes `combine_rounded` of many rows, in the residual's place."""
    (m, per_row), hidden, rounding = weights.shape, made.shape[1], norm.rounding
    assert rounding is not None
    rounded = room_for(residual, rounding, turned=True)
    _combine_row[(m,)](
        *(made, weights, residual, norm.gain, *rounded.places, norm.eps),
        WIDTH=hidden,
        BLOCK=power_of_2(hidden),
        PER_ROW=per_row,
        MODE=mode_of(rounding),
        PDL=pdl,
        num_warps=_WARPS,
        launch_pdl=pdl,
    )
    return rounded


@kernel(do_not_specialize=["apart"])
def _combine_row(
    made, weights, residual, gain, stored, scales, turned, apart, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PER_ROW: tl.constexpr, MODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A whole row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < WIDTH
    gains = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    after_previous(PDL)
    at = residual + row * WIDTH + column
    whole = _sum_of_choices(at, made, weights, row, column, inside, WIDTH, PER_ROW)
    tl.store(at, whole, mask=inside)
    wide = whole.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps) * gains
    rounded_row(normed.to(whole.dtype), row, stored, scales, turned, apart, 0.0, WIDTH, MODE)


@triton.jit
def _sum_of_choices(
    residual, made, weights, row, column, inside, WIDTH: tl.constexpr, PER_ROW: tl.constexpr
):  # fmt: skip
    """Columns of a row: the residual, at those addresses, and what its experts made, by weight; rounded."""
    total = tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(PER_ROW):
        choice = row * PER_ROW + k
        values = tl.load(made + choice * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + choice) * values
    return total.to(residual.dtype.element_ty)


@kernel
def _combine_rounded(
    made, weights, residual, gain, out, stored, scales, squares,
    WIDTH: tl.constexpr, PER_ROW: tl.constexpr, COLUMNS: tl.constexpr, POWERS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Some columns of a row."""
    BLOCKS: tl.constexpr = WIDTH // 128
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    gains = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    after_previous(PDL)
    at = row.to(tl.int64) * WIDTH + column
    whole = _sum_of_choices(
        residual + at, made, weights, row.to(tl.int64), column, inside, WIDTH, PER_ROW
    )  # fmt: skip
    tl.store(out + at, whole, mask=inside)
    wide = whole.to(tl.float32)
    tl.store(squares + row * parts + part, tl.sum(wide * wide, 0))
    gained = (wide * gains).to(out.dtype.element_ty)
    EACH: tl.constexpr = COLUMNS // 128
    rounded, scale = quantised(tl.reshape(gained, (EACH, 128)), POWERS)
    tl.store(stored + at, tl.reshape(rounded, (COLUMNS,)), mask=inside)
    block = part * EACH + tl.arange(0, EACH)
    tl.store(scales + row * BLOCKS + block, scale, mask=block < BLOCKS)
