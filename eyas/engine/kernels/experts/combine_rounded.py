"""Adds up a row's experts by weight, and the residual; and norms and rounds the row for what reads it in FP8.

A norm multiplies a whole row by one number, which may as well multiply the scales of its blocks. So each
program rounds its columns, times the gain, as they are; the last of a row to arrive adds up the squares, in
order, and finishes the scales. What it computes is no `exact` arithmetic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.kernels.products.blocks import SIDE, Fp8Rows, quantised, room_for
from eyas.engine.kernels.products.rows import NormInput
from eyas.engine.kernels.products.skinny import MAX_ROWS, ProductLaunch, empty_padded

_COLUMNS = 512  # of a row, that a program adds up


def can_round(m: int, hidden: int, norm: NormInput) -> bool:
    """Whether `combine_rounded` takes m rows [m, hidden] that are read so."""
    blocks = norm.rounding is not None and norm.rounding.rows == "block" and norm.gain is not None
    return m <= MAX_ROWS and blocks and hidden % SIDE == 0


def combine_rounded(
    made: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor,
    norm: NormInput,
    launch: ProductLaunch,
) -> tuple[torch.Tensor, Fp8Rows]:
    """made [m * per_row, hidden], weights float32 [m, per_row], residual [m, hidden] -> their sum, rounded
    once, and its norm in FP8.
    """
    (m, per_row), hidden, rounding = weights.shape, made.shape[1], norm.rounding
    assert rounding is not None and norm.gain is not None
    out, rounded = empty_padded(m, hidden, like=made), room_for(residual, rounding)
    parts = cdiv(hidden, _COLUMNS)
    squares = torch.empty(m, parts, dtype=torch.float32, device=made.device)
    _combine_rounded[(m, parts)](
        *(made, weights, residual, norm.gain, out, rounded.stored, rounded.scales, squares),
        *(launch.tickets, norm.eps),
        WIDTH=hidden,
        PER_ROW=per_row,
        COLUMNS=_COLUMNS,
        PARTS=power_of_2(parts),
        SIDE=power_of_2(cdiv(hidden, SIDE)),
        POWERS=rounding.powers,
        PDL=launch.pdl,
        num_warps=4,
        launch_pdl=launch.pdl,
    )
    return out, rounded


@kernel
def _combine_rounded(
    made, weights, residual, gain, out, stored, scales, squares, tickets, eps,
    WIDTH: tl.constexpr, PER_ROW: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    SIDE: tl.constexpr, POWERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some columns of a row."""
    BLOCKS: tl.constexpr = WIDTH // 128
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    gains = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    after_previous(PDL)
    at = row.to(tl.int64) * WIDTH + column
    total = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(PER_ROW):
        choice = row.to(tl.int64) * PER_ROW + k
        values = tl.load(made + choice * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + choice) * values
    whole = total.to(out.dtype.element_ty)
    tl.store(out + at, whole, mask=inside)
    wide = whole.to(tl.float32)
    tl.store(squares + row * parts + part, tl.sum(wide * wide, 0))
    gained = (wide * gains).to(out.dtype.element_ty)
    EACH: tl.constexpr = COLUMNS // 128
    rounded, scale = quantised(tl.reshape(gained, (EACH, 128)), POWERS)
    tl.store(stored + at, tl.reshape(rounded, (COLUMNS,)), mask=inside)
    block = part * EACH + tl.arange(0, EACH)
    tl.store(scales + row * BLOCKS + block, scale, mask=block < BLOCKS)
    tl.debug_barrier()  # one thread takes the ticket, for the stores of all
    if tl.atomic_add(tickets + row, 1, sem="acq_rel") == parts - 1:
        tl.store(tickets + row, 0)
        finish_scales(
            scales + row * BLOCKS, squares + row * parts, parts, eps, WIDTH, PARTS, SIDE
        )  # fmt: skip


@triton.jit
def finish_scales(
    scales, squares, parts, eps, WIDTH: tl.constexpr, PARTS: tl.constexpr, SIDE: tl.constexpr
):  # fmt: skip
    """Multiplies the scales of a row's blocks of 128, up to SIDE of them, by what its norm multiplies the row
    by: of the sums of squares of its parts, up to PARTS of them. Others have just stored both.
    """
    BLOCKS: tl.constexpr = WIDTH // 128
    each, every = tl.arange(0, PARTS), tl.arange(0, SIDE)
    # Past L1, which does not see the stores of other SMs.
    found = tl.load(squares + each, mask=each < parts, other=0.0, cache_modifier=".cg")
    known = tl.load(scales + every, mask=every < BLOCKS, other=0.0, cache_modifier=".cg")
    factor = tl.rsqrt(tl.sum(found, 0) / WIDTH + eps)
    tl.store(scales + every, known * factor, mask=every < BLOCKS)
