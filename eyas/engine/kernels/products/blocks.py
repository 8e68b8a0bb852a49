"""Rows in FP8: a scale for each 128 of a row, for a row, or one that is stored.

A weight is q * scale, block by block or row by row of it (`eyas.engine.checkpoint.fp8`, the plain statement);
a row x is q * s with s = max(largest of the 128, or of the row, 1e-4) / 448 (arXiv 2412.19437, section 3.3),
or the next power of two where the checkpoint says so (UE8M0). Rows are rounded once: by the kernel that makes
them, if it has all that shares a scale (`rounded_row`, `quantised`), else by one of their own (`quantise`).
In every tile that reads them, it would cost more than the tile's product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2

SIDE = 128
ALIGNED = 4
"""Rows: to a multiple of it memory is there."""
MANY = 256
"""Rows: of as many their scales lie by block, too."""

LARGEST = tl.constexpr(448.0)
LEAST = tl.constexpr(1e-4)  # of a scale's numerator, so that rows of zeros have one
_BLOCKS = 8  # blocks of a row that a program rounds
_COLUMNS = 4096  # of a row, at a time, where it has one scale


@dataclass(frozen=True)
class StoredWeight:
    """A weight [..., n, k] as kernels read it: numbers, or e4m3 and the float32 scales that multiply them.

    `rounding`: how the rows are rounded that meet numbers with scales. Where those have a scale for each 128,
    there are [..., ceil(n / 128), ceil(k / 128)] scales, else [..., n].
    """

    stored: torch.Tensor
    scales: torch.Tensor | None = None
    rounding: RowRounding | None = None

    @property
    def shape(self) -> torch.Size:
        """[n, k], or [experts, n, k]."""
        return self.stored.shape

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return self.stored.element_size()

    def read(self, x: Rows, pdl: bool = False) -> Rows:
        """Rows [m, k] as products with this weight read them: for several that read the same."""
        if self.rounding is None or not isinstance(x, torch.Tensor):
            return x
        return quantise(x, self.rounding, pdl)


@dataclass(frozen=True)
class RowSquares:
    """Sums of squares of parts of rows [m, k], float32 [m, parts]: a norm multiplies a row by rsqrt(its sum /
    k + eps).
    """

    sums: torch.Tensor
    eps: float

    @property
    def parts(self) -> int:
        """Sums of a row."""
        return self.sums.shape[1]


@dataclass(frozen=True)
class Fp8Rows:
    """Rows e4m3 [m, k], and scales float32 [m, ceil(k / 128)], or [m] if a row has one.

    Behind the rows is memory for a multiple of four. `dtype`: in which products give results. `turned`: the
    scales as cuBLAS reads them, [ceil(k / 128), m to a multiple of four], if they lie so too. `squares`: of
    up to 128 rows, if the dense product that reads them still has to apply their norm.
    """

    stored: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype
    turned: torch.Tensor | None = None
    squares: RowSquares | None = None

    @property
    def places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
        """The tensors into which a kernel writes: numbers, scales, scales by block; and how far apart blocks
        are.
        """
        return self.stored, self.scales, self.turned, 0 if self.turned is None else self.turned.stride(0)


@dataclass(frozen=True)
class NormedRows:
    """Rows that have passed a norm [m, k], if they are read so; and `rounded`, by `rounding`, where weights
    in FP8 read them.
    """

    rows: torch.Tensor | None
    rounded: Fp8Rows | None = None
    rounding: RowRounding | None = None

    @property
    def plain(self) -> torch.Tensor:
        """The rows as they are."""
        assert self.rows is not None, "these rows are only read rounded"
        return self.rows

    def read_by(self, rounding: RowRounding | None) -> Rows:
        """The rows for products that round so: plain ones, if that is another way."""
        return self.plain if self.rounded is None or rounding != self.rounding else self.rounded


Rows = torch.Tensor | Fp8Rows
"""[m, k]; what is not rounded to FP8 yet is, where the weight is in FP8."""


def count_of(x: Rows) -> int:
    """The number of rows."""
    return len(x.stored if isinstance(x, Fp8Rows) else x)


def parts_of(rows: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Their numbers, and the scales of those."""
    return (rows.stored, rows.scales) if isinstance(rows, Fp8Rows) else (rows, None)


def widened(rows: Rows) -> torch.Tensor:
    """The numbers that rows mean [m, k]."""
    if isinstance(rows, torch.Tensor):
        return rows
    scales = rows.scales if rows.scales.dim() == 2 else rows.scales[:, None]
    side = SIDE if rows.scales.dim() == 2 else rows.stored.shape[1]
    wide = scales.repeat_interleave(side, 1)[:, : rows.stored.shape[1]]
    if rows.squares is not None:
        mean = rows.squares.sums.sum(1, keepdim=True) / rows.stored.shape[1]
        wide = wide * (mean + rows.squares.eps).rsqrt()
    return (rows.stored.float() * wide).to(rows.dtype)


def squares_of(rows: Rows) -> tuple[torch.Tensor | None, int, float]:
    """`RowSquares` as a kernel's arguments: the sums, how many a row has, and eps."""
    squares = rows.squares if isinstance(rows, Fp8Rows) else None
    return (None, 0, 0.0) if squares is None else (squares.sums, squares.parts, squares.eps)


def quantise(x: torch.Tensor, rounding: RowRounding, pdl: bool = False) -> Fp8Rows:
    """x [m, k]. What has one scale for a row has no powers of two."""
    (m, k), out = x.shape, room_for(x, rounding, turned=True)
    if rounding.rows != "block":
        columns = min(power_of_2(k), _COLUMNS)
        given = {"K": k, "COLUMNS": columns, "STORED": rounding.rows == "tensor", "PDL": pdl}
        _quantise_rows[(m,)](x, out.stored, out.scales, rounding.scale, **given, num_warps=8, launch_pdl=pdl)
        return out
    count = out.scales.shape[1]
    blocks = min(_BLOCKS, power_of_2(count))
    grid = (m, cdiv(count, blocks))
    sizes = {"K": k, "COUNT": count, "BLOCKS": blocks, "POWERS": rounding.powers, "PDL": pdl}
    _quantise[grid](x, *out.places, **sizes, num_warps=4, launch_pdl=pdl)
    return out


def room_for(rows: torch.Tensor, rounding: RowRounding, turned: bool = False) -> Fp8Rows:
    """Allocates the result of rounding rows [m, k] like these. `turned`: of `MANY` with scales by block too,
    which who makes the rows writes.
    """
    (m, k), device = rows.shape, rows.device
    aligned, by_block = cdiv(m, ALIGNED) * ALIGNED, rounding.rows == "block"
    stored = torch.empty(aligned, k, dtype=torch.float8_e4m3fn, device=device)
    count = cdiv(k, SIDE)
    scales = torch.empty((m, count) if by_block else (m,), dtype=torch.float32, device=device)
    turned &= by_block and m >= MANY
    return Fp8Rows(stored[:m], scales, rows.dtype, scales.new_empty(count, aligned) if turned else None)


def mode_of(rounding: RowRounding) -> str:
    """The name of a rounding in kernels."""
    return "powers" if rounding.rows == "block" and rounding.powers else rounding.rows


@kernel
def _quantise_rows(
    x, stored, scales, given,
    K: tl.constexpr, COLUMNS: tl.constexpr, STORED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row by its own scale, or by the given one. What is not a number stays none."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    if STORED:
        divisor = tl.zeros((COLUMNS,), tl.float32) + given
    else:
        largest = tl.full((COLUMNS,), LEAST, tl.float32)
        for first in range(0, K, COLUMNS):
            values = tl.load(x + row * K + first + column, mask=first + column < K, other=0.0)
            largest = tl.maximum(largest, tl.abs(values.to(tl.float32)))
        most = tl.zeros((COLUMNS,), tl.float32) + tl.max(largest, 0)
        divisor = tl.div_rn(most, tl.zeros_like(most) + LARGEST)
    tl.store(scales + row, tl.max(divisor, 0))
    for first in range(0, K, COLUMNS):
        values = tl.load(x + row * K + first + column, mask=first + column < K, other=0.0)
        rounded = tl.div_rn(values.to(tl.float32), divisor)
        rounded = tl.clamp(rounded, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        tl.store(stored + row * K + first + column, rounded.to(tl.float8e4nv), mask=first + column < K)


@kernel(do_not_specialize=["apart"])
def _quantise(
    x, stored, scales, turned, apart,
    K: tl.constexpr, COUNT: tl.constexpr, BLOCKS: tl.constexpr, POWERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some blocks of a row."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(x + row * K + column, mask=column < K, other=0.0)
    rounded, scale = quantised(values, POWERS)
    tl.store(stored + row * K + column, rounded, mask=column < K)
    store_scales(scales, turned, apart, row, block, scale, COUNT)


@triton.jit
def norm_factor(squares, row, eps, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """What a norm multiplies each of `row` [n] by, float32 [n]. PARTS sums of squares each: `RowSquares`."""
    SLOTS: tl.constexpr = triton.next_power_of_2(PARTS)
    part = tl.arange(0, SLOTS)[None, :]
    found = tl.load(squares + row[:, None] * PARTS + part, mask=part < PARTS, other=0.0)
    return tl.rsqrt(tl.sum(found, 1) / WIDTH + eps)


@triton.jit
def store_scales(scales, turned, apart, row, block, scale, COUNT: tl.constexpr):
    """Stores the scales of some blocks of a row with COUNT of them."""
    tl.store(scales + row * COUNT + block, scale, mask=block < COUNT)
    if turned is not None:
        tl.store(turned + block * apart + row, scale, mask=block < COUNT)


@triton.jit
def rounded_row(
    values, row, stored, scales, turned, apart, given, WIDTH: tl.constexpr, MODE: tl.constexpr
):  # fmt: skip
    """One row, values [a multiple of 128] with zeros from WIDTH on, stored as `quantise` does.

    MODE: a scale for each 128 of it ("block", "powers"), for the row ("token"), or the given one ("tensor").
    """
    SIZE: tl.constexpr = values.shape[0]
    if MODE == "block" or MODE == "powers":
        COUNT: tl.constexpr = (WIDTH + 127) // 128
        block = tl.arange(0, SIZE // 128)
        column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
        rounded, scale = quantised(tl.reshape(values, (SIZE // 128, 128)), MODE == "powers")
        tl.store(stored + row * WIDTH + column, rounded, mask=column < WIDTH)
        store_scales(scales, turned, apart, row, block, scale, COUNT)
    else:
        column, wide = tl.arange(0, SIZE), values.to(tl.float32)
        divisor = tl.zeros((SIZE,), tl.float32) + given
        if MODE == "token":
            largest = tl.max(tl.maximum(tl.abs(wide), LEAST), 0)
            divisor = tl.div_rn(tl.zeros_like(wide) + largest, tl.zeros_like(wide) + LARGEST)
        tl.store(scales + row, tl.max(divisor, 0))
        rounded = tl.clamp(tl.div_rn(wide, divisor), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        tl.store(stored + row * WIDTH + column, rounded.to(tl.float8e4nv), mask=column < WIDTH)


@triton.jit
def quantised(values, POWERS: tl.constexpr):
    """values [m, 128] -> e4m3 of that shape, and float32 [m]."""
    wide = values.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), 1), LEAST)
    scale = tl.div_rn(largest, tl.zeros_like(largest) + LARGEST)
    if POWERS:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return _over(wide, scale, POWERS).to(tl.float8e4nv), scale


@triton.jit
def _over(wide, scale, POWERS: tl.constexpr):
    """wide [m, n] / scale [m], at most `LARGEST`, with one division for each row of it. To the bit, but for
    the sign of zeros.

    A quotient by the reciprocal, corrected once by what it leaves, is the rounded one where the reciprocal is
    (Markstein, IBM J. Res. Dev. 34, 1990); where that is a power of two there is nothing to correct. A
    division for each number takes longer than memory does to give it.
    """
    inverse = tl.zeros_like(wide) + tl.div_rn(tl.zeros_like(scale) + 1.0, scale)[:, None]
    quotient = wide * inverse
    if not POWERS:
        left = tl.fma(-quotient, tl.zeros_like(wide) + scale[:, None], wide)
        quotient = tl.fma(left, inverse, quotient)
    return quotient
