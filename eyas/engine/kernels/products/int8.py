"""Whole numbers of eight bits as products of few rows read them: a byte each, widened in registers.

A matrix is (number - zero point) * scale, with a scale and a zero point for each group of a row's columns.
Types of 16 bits hold a number less its zero point exactly; scales multiply sums of products, in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.kernels.products.integers import IntegerWeight
from eyas.engine.kernels.products.skinny_tiles import PackedStep

UNITS = (128, 64, 32)
"""Columns of a step; the first that divides a group."""

_MIDDLE = 128  # of unsigned numbers
_ROWS = 32  # that a program widens


@dataclass(frozen=True)
class Int8Weight(IntegerWeight):
    """A matrix [n, k], or one for each expert: all tensors then have that dimension before the others.

    `words`: int8 [n, steps * unit]; of experts [steps, n, unit]. `scales`: [groups, n], of any type. `zeros`:
    the same of zero points, in `dtype`; None: there are none. A group has `unit` columns.
    """

    dtype: torch.dtype

    @property
    def unit(self) -> int:
        """Columns that have one scale."""
        return self.columns // self.scales.shape[-2]

    @property
    def step(self) -> PackedStep:
        return PackedStep("int8", self.unit, 1, self.words.element_size())

    @property
    def together(self) -> int:
        return self.unit

    def _points(self) -> torch.Tensor:
        return (
            self.scales.new_zeros(self.scales.shape, dtype=self.dtype) if self.zeros is None else self.zeros
        )

    def widened(self) -> torch.Tensor:
        n, k = self.shape
        out = torch.empty(n, k, dtype=self.dtype, device=self.words.device)
        grid = (k // self.unit, cdiv(n, _ROWS))
        _widen[grid](self.words, self.scales, self.zeros, out, n, k, UNIT=self.unit, ROWS=_ROWS, num_warps=4)
        return out


def served(k: int, groups: int) -> bool:
    """True if kernels have rows of k in that many groups."""
    return k % groups == 0 and math.gcd(k // groups, UNITS[0]) in UNITS


def packed(
    numbers: torch.Tensor, zeros: torch.Tensor | int, scales: torch.Tensor, dtype: torch.dtype
) -> Int8Weight:
    """Packs numbers, uint8 or int8 [n, k]; zeros, one or [n, groups], and scales [n, groups]."""
    k, groups = numbers.shape[1], scales.shape[1]
    middle = 0 if numbers.dtype == torch.int8 else _MIDDLE
    signed = numbers if middle == 0 else (numbers.short() - middle).to(torch.int8)
    shares = k // groups // math.gcd(k // groups, UNITS[0])
    points: torch.Tensor | None = None
    if not isinstance(zeros, int):
        points = zeros.float() - middle
    elif zeros != middle:
        points = torch.full(scales.shape, float(zeros - middle), device=scales.device)
    if points is not None:
        points = points.to(dtype).repeat_interleave(shares, 1).t().contiguous()
    return Int8Weight(signed, scales.repeat_interleave(shares, 1).t().contiguous(), points, k, dtype)


@triton.jit
def numbers_of(words, zeros, dtype: tl.constexpr):
    """Numbers of words [n, unit], less their rows' zero points [n], if there are any: in a type."""
    made = words.to(dtype)
    if zeros is not None:
        made = (made - zeros[:, None]).to(dtype)
    return made


@kernel
def _widen(words, scales, zeros, out, n, k, UNIT: tl.constexpr, ROWS: tl.constexpr):
    """Grid (groups, blocks of rows): programs that run together write whole rows."""
    row, group = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0)
    at = row.to(tl.int64)[:, None] * k + group * UNIT + tl.arange(0, UNIT)[None, :]
    there, place = row < n, group * n + row
    zero = None
    if zeros is not None:
        zero = tl.load(zeros + place, mask=there, other=0.0)
    scale = tl.load(scales + place, mask=there, other=0.0).to(tl.float32)
    numbers = numbers_of(tl.load(words + at, mask=there[:, None], other=0), zero, out.dtype.element_ty)
    made = numbers.to(tl.float32) * scale[:, None]
    tl.store(out + at, made.to(out.dtype.element_ty), mask=there[:, None])
