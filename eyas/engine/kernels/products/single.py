"""Products of one row, or of a few: weights wait in registers until the row is there.

A product of one row takes as long as its weights take to come. So each program asks for all of its weight
rows at once, before it waits for the kernel that makes the row, and multiplies them in float32 when the row
has come: no matrix unit, and no sum over several programs. `gated` takes one row to the experts that it
chose, and `back` adds up what they make. Its tests compare it with `grouped`. What it computes follows no
number of rows, but is no `exact` arithmetic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eyas.engine.kernels.experts.route import ChosenExperts
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.kernels.products.activation import steepness
from eyas.engine.kernels.products.blocks import (
    SIDE,
    Fp8Rows,
    Rows,
    StoredWeight,
    count_of,
    mode_of,
    norm_factor,
    parts_of,
    quantised,
    squares_of,
)
from eyas.engine.kernels.products.skinny import MAX_ROWS, empty_padded
from eyas.engine.kernels.products.skinny_kernels import SUMS_WIDTH

_WARPS = 4
_REGISTER_BYTES = 32 * 1024  # bytes of weights that a program's registers hold
_ROWS = 8
_ROUNDED = 2048  # elements of a row that each program rounds by itself; more are rounded once, before
_PROGRAMS = 264  # fewer have fewer rows each: two for every SM of a Hopper GPU


def can_hold(weight: StoredWeight, together: int = 1) -> bool:
    """True if a program's registers hold two rows of the weight [.., n, k], which a gate may join, of each of
    `together` experts.
    """
    block = int(power_of_2(weight.shape[-1]) * power_of_2(together))
    return 2 * block * weight.itemsize <= _REGISTER_BYTES


def can_take(x: torch.Tensor, weight: StoredWeight) -> bool:
    """True if rows x [m, k] are few enough to meet the weight one after the other."""
    return len(x) <= _ROWS and can_hold(weight)


def can_round(weight: StoredWeight) -> bool:
    """True if `back` supports the rounding of rows that meet the weight."""
    return weight.rounding is None or weight.rounding.rows == "block"


def can_read(x: Rows, weight: StoredWeight) -> bool:
    """True if `dense` takes x as it is: in the weight's type, or short enough to be rounded here."""
    if isinstance(x, Fp8Rows) or weight.rounding is None:
        return True
    return weight.rounding.rows == "block" and x.shape[1] <= _ROUNDED


def dense(x: Rows, weight: StoredWeight, pdl: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [m, k] . weight [n, k]^T -> [m, n], in float32 and rounded once to `dtype` (None: x's). Few rows."""
    like = x.scales if isinstance(x, Fp8Rows) else x
    out = like.new_empty(count_of(x), weight.shape[0], dtype=dtype or x.dtype)
    _start(x, weight, out, None, (False, False), pdl)
    return out


def gated(
    x: Rows, weight: StoredWeight, chosen: torch.Tensor | None, gelu: bool = False, pdl: bool = False
) -> torch.Tensor:
    """One row x [1, k]; weight [2 width, k], or with `chosen` int32 [choices] [experts, 2 width, k].

    -> act(gate) * up, [choices, width], or [1, width].
    """
    like = x.scales if isinstance(x, Fp8Rows) else x
    rows = 1 if chosen is None else chosen.numel()
    out = like.new_empty(rows, weight.shape[-2] // 2, dtype=x.dtype)
    _start(x, weight, out, chosen, (True, gelu), pdl)
    return out


def back(inner: torch.Tensor, weight: StoredWeight, chosen: ChosenExperts, pdl: bool = False) -> torch.Tensor:
    """inner [choices, width], weight [experts, hidden, width] -> [1, hidden]: what one row's experts make of
    it, added up by weight in float32. What meets weights in FP8 is rounded here, in blocks of 128.

    With `pdl`, `chosen` is read before the wait for `inner`. So what makes `inner` must itself wait for
    `chosen` before it lets others be launched, as `gated` does.
    """
    return _start_back(inner, weight, chosen, None, None, pdl)


def back_add(
    inner: torch.Tensor,
    weight: StoredWeight,
    chosen: ChosenExperts,
    residual: torch.Tensor,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `back`, added to `residual` [1, hidden] and rounded once.

    Returns the row and its sums of squares, float32 [parts, 128], for `skinny.SkinnyInput`.
    """
    parts = cdiv(weight.shape[-2], _rows_of_back(inner, weight))
    sums = torch.empty(parts, MAX_ROWS, dtype=torch.float32, device=inner.device)
    return _start_back(inner, weight, chosen, residual, sums, pdl), sums


def _rows_of_back(inner: torch.Tensor, weight: StoredWeight) -> int:
    """The number of columns of the result that a program makes."""
    each = max(power_of_2(inner.shape[1]), SIDE) * len(inner) * weight.itemsize
    return min(1 << (3 * _REGISTER_BYTES // each).bit_length() - 1, SIDE)


def _start_back(
    inner: torch.Tensor,
    weight: StoredWeight,
    chosen: ChosenExperts,
    residual: torch.Tensor | None,
    sums: torch.Tensor | None,
    pdl: bool,
) -> torch.Tensor:
    (count, width), hidden, rows = inner.shape, weight.shape[-2], _rows_of_back(inner, weight)
    out = empty_padded(1, hidden, like=inner)
    _back[(cdiv(hidden, rows),)](
        *parts_of(weight.read(inner, pdl)),
        *(weight.stored, weight.scales, chosen.experts, chosen.weights, residual, out, sums),
        N=hidden,
        K=width,
        ROWS=rows,
        BLOCK=max(power_of_2(width), SIDE),
        COUNT=count,
        PDL=pdl,
        num_warps=2 * _WARPS,
        launch_pdl=pdl,
    )
    return out


def _start(
    x: Rows,
    weight: StoredWeight,
    out: torch.Tensor,
    chosen: torch.Tensor | None,
    gate: tuple[bool, bool],
    pdl: bool,
) -> None:
    (rows, row_scales), rounding = parts_of(x), weight.rounding
    is_gated, gelu = gate
    n, k = weight.shape[-2:]
    outputs, block = n // 2 if is_gated else n, max(power_of_2(k), SIDE)
    choices = 1 if chosen is None else chosen.numel()
    squares, parts, eps = squares_of(x)
    each = block * weight.itemsize * (2 if is_gated else 1)
    rows_each = _rows_per_program(each if chosen is None else each // 2, outputs * choices)
    _products[(cdiv(outputs, rows_each), choices)](
        *(rows, row_scales, squares, weight.stored, weight.scales, out, chosen, rows.shape[0], eps),
        N=n,
        K=k,
        OUTPUTS=outputs,
        ROWS=rows_each,
        BLOCK=block,
        GATED=is_gated,
        GELU=gelu,
        CHANNELS=rounding is not None and rounding.rows != "block",
        ROUNDED="" if row_scales is not None or rounding is None else mode_of(rounding),
        SINGLE=rows.shape[0] == 1,
        PARTS=parts,
        PDL=pdl,
        num_warps=_WARPS,
        launch_pdl=pdl,
    )


def _rows_per_program(each: int, outputs: int) -> int:
    """Weight rows of a program, where one of them has `each` bytes and `outputs` are to be read."""
    rows = max(_REGISTER_BYTES // each, 1)
    while rows > 1 and cdiv(outputs, rows) < _PROGRAMS:
        rows //= 2
    return min(rows, SIDE)


@kernel(do_not_specialize=["m"])
def _products(
    x, x_scales, squares, weights, scales, out, chosen, m, eps,
    N: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, CHANNELS: tl.constexpr, ROUNDED: tl.constexpr,
    SINGLE: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the result's columns, choices). With `squares` there is one row."""
    first, choice = tl.program_id(0) * ROWS, tl.program_id(1)
    expert = tl.full((), 0, tl.int32)
    if chosen is not None:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()  # not before: then what follows may read the choices at once
        expert = tl.load(chosen + choice)
    taken, expert = expert >= 0, tl.maximum(expert, 0)
    row, column = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    there = (row < OUTPUTS) & taken
    inside = there[:, None] & (column < K)[None, :]
    at = weights + (expert * N + row).to(tl.int64)[:, None] * K + column[None, :]
    a = tl.load(at, mask=inside, other=0.0)
    b = tl.load(at + OUTPUTS * K, mask=inside, other=0.0) if GATED else a
    by_row_a, by_row_b, by_column_a, by_column_b = 1.0, 1.0, 1.0, 1.0
    if CHANNELS:
        by_row_a = tl.load(scales + expert * N + row, mask=there, other=0.0)
        if GATED:
            by_row_b = tl.load(scales + expert * N + row + OUTPUTS, mask=there, other=0.0)
    elif scales is not None:
        blocks = scales + (expert * ((N + 127) // 128) + first // 128) * ((K + 127) // 128)
        by_column_a = spread(blocks, K, BLOCK)
        if GATED:
            by_column_b = spread(blocks + OUTPUTS // 128 * ((K + 127) // 128), K, BLOCK)
    if chosen is None:
        after_previous(PDL)
    values = row_of(x, x_scales, 0, K, BLOCK, CHANNELS, ROUNDED)
    if squares is not None:
        by_row_a = norm_factor(squares, tl.arange(0, 1), eps, PARTS, K)
        by_row_b = by_row_a
    if SINGLE:
        _finish(
            values, a, b, by_row_a, by_row_b, by_column_a, by_column_b,
            out + choice * OUTPUTS + row, there, GATED, GELU,
        )  # fmt: skip
    else:
        for each in range(m):
            ahead = row_of(
                x, x_scales, tl.minimum(each + 1, m - 1), K, BLOCK, CHANNELS, ROUNDED
            )  # fmt: skip
            _finish(
                values, a, b, by_row_a, by_row_b, by_column_a, by_column_b,
                out + each * OUTPUTS + row, there, GATED, GELU,
            )  # fmt: skip
            values = ahead


@triton.jit
def _finish(
    values, a, b, by_row_a, by_row_b, by_column_a, by_column_b, to, there,
    GATED: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    y = tl.sum(a.to(tl.float32) * (values * by_column_a)[None, :], 1) * by_row_a
    if GATED:
        up = tl.sum(b.to(tl.float32) * (values * by_column_b)[None, :], 1) * by_row_b
        y = y * up / (1.0 + tl.exp(-steepness(y, GELU)))
    tl.store(to, y.to(to.dtype.element_ty), mask=there)


@triton.jit
def row_of(
    x, x_scales, row, K: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
    ROUNDED: tl.constexpr,
):  # fmt: skip
    """The values of a row, float32 [BLOCK]; ROUNDED: by blocks of 128, which is done here."""
    column = tl.arange(0, BLOCK)
    values = tl.load(x + row * K + column, mask=column < K, other=0.0).to(tl.float32)
    if ROUNDED != "":
        rounded, scale = quantised(tl.reshape(values, (BLOCK // 128, 128)), ROUNDED == "powers")
        values = tl.reshape(rounded.to(tl.float32) * scale[:, None], (BLOCK,))
    elif CHANNELS:
        values *= tl.load(x_scales + row)
    elif x_scales is not None:
        values *= spread(x_scales + row * ((K + 127) // 128), K, BLOCK)
    return values


@triton.jit
def spread(scales, K: tl.constexpr, BLOCK: tl.constexpr):
    """A scale for each 128 of K, as one for each of BLOCK."""
    each = tl.arange(0, BLOCK // 128)
    by_block = tl.load(scales + each, mask=each < (K + 127) // 128, other=0.0)
    return tl.reshape(tl.broadcast_to(by_block[:, None], (BLOCK // 128, 128)), (BLOCK,))


@kernel
def _back(
    inner, inner_scales, weights, scales, chosen, shares, residual, out, sums,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Some columns of the result, of all choices. These are there at once: see `back`."""
    if PDL:
        gdc_launch_dependents()
    first = tl.program_id(0) * ROWS
    row, column = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    there = (row < N)[:, None] & (column < K)[None, :]
    WIDTH: tl.constexpr = (K + 127) // 128
    tiles, factors = (), ()
    for choice in tl.static_range(COUNT):
        expert = tl.load(chosen + choice, cache_modifier=".cg")  # past L1: others wrote it just now
        taken, expert = expert >= 0, tl.maximum(expert, 0)
        at = weights + (expert * N + row).to(tl.int64)[:, None] * K + column[None, :]
        tiles = tiles + (tl.load(at, mask=there & taken, other=0.0),)  # type: ignore[assignment]
        factor = tl.where(taken, tl.load(shares + choice, cache_modifier=".cg"), 0.0)
        if scales is not None:
            by_block = scales + (expert * ((N + 127) // 128) + first // 128) * WIDTH
            factor = factor * spread(by_block, K, BLOCK)
        factors = factors + (factor,)  # type: ignore[assignment]
    if PDL:
        gdc_wait()
    total = tl.zeros((ROWS, BLOCK // 16), tl.float32)
    for choice in tl.static_range(COUNT):
        values = row_of(inner, inner_scales, choice, K, BLOCK, False, "") * factors[choice]
        values = tl.where(factors[choice] != 0.0, values, 0.0)  # what none chose may be anything
        made = tiles[choice].to(tl.float32) * values[None, :]
        total += tl.sum(tl.reshape(made, (ROWS, BLOCK // 16, 16)), 2)
    y = tl.sum(total, 1)
    if residual is not None:
        y += tl.load(residual + row, mask=row < N, other=0.0).to(tl.float32)
    made = y.to(out.dtype.element_ty)
    tl.store(out + row, made, mask=row < N)
    if sums is not None:
        left = tl.where(row < N, made.to(tl.float32), 0.0)
        tl.store(sums + tl.program_id(0) * SUMS_WIDTH, tl.sum(left * left))
