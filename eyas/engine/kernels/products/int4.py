"""Numbers of four bits as the products of few rows read them: four in a word, widened in registers.

A matrix is (number - zero point) * scale; some columns of a row, a group, have one scale and one zero point
(GPTQ, arXiv 2210.17323; AWQ, arXiv 2306.00978). A word holds the numbers of four columns that are `unit`
apart, so that its lowest numbers are one stretch of columns, the next ones the stretch behind that: each is
an operand of the matrix unit, without a move between threads. What a number less its zero point is, types of
16 bits hold exactly; scales multiply sums of products, in float32. In exact arithmetic scales are of the type
of rows, and multiply the numbers: so the matrix unit has the widened matrix, and its sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.launching import INTERPRETED, kernel
from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.kernels.products.integers import IntegerWeight
from eyas.engine.kernels.products.skinny_tiles import PackedStep

PARTS = 4
"""Numbers in a word."""

UNITS = (64, 32)
"""Columns between two numbers of a word; the first that divides a group."""

BLOCK = 128
"""Columns of a group where there is one for a whole row, or a larger one."""

_ROWS = 16  # that a program widens

_BASES = {torch.bfloat16: 128.0, torch.float16: 1024.0, torch.float32: 0.0}
"""What a type's number begins as: the bits of this, with the packed number as the lowest."""


@dataclass(frozen=True)
class Int4Weight(IntegerWeight):
    """A matrix [n, k], or one for each expert: all tensors then have that dimension before the others.

    `words`: int16 [n, steps * unit], where a step is four units of columns; of experts [steps, n, unit].

    `scales`: [groups, n], of any type. `zeros`: [groups, n], the zero points as `_number` takes them, in
    the type of the rows that the weight multiplies; None: eight everywhere.
    """

    unit: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Columns that have one scale."""
        return self.columns // self.scales.shape[-2]

    @property
    def step(self) -> PackedStep:
        return PackedStep("int4", self.unit, PARTS, self.words.element_size())

    @property
    def together(self) -> int:
        return min(self.group, self.step.columns)

    @property
    def base(self) -> float:
        """The number that `zeros` has beside the zero points."""
        return _BASES[self.dtype]

    def is_exact(self, stretches: int) -> bool:
        whole = self.columns % stretches == 0 and self.columns // stretches % self.group == 0
        return whole and self.scales.dtype == self.dtype

    def _points(self) -> torch.Tensor:
        if self.zeros is not None:
            return self.zeros
        return torch.full_like(self.scales, self.base + 8, dtype=self.dtype)

    def widened(self) -> torch.Tensor:
        n, k = self.shape
        out = torch.empty(n, k, dtype=self.dtype, device=self.words.device)
        sizes = (n, k, self.words.shape[1], self.group)
        grid = (cdiv(k, self.step.columns), cdiv(n, _ROWS))
        _widen[grid](
            self.words, self.scales, self.zeros, out, *sizes, UNIT=self.unit, ROWS=_ROWS, num_warps=4
        )
        return out


def served(k: int, groups: int, stretch: int = 0) -> bool:
    """True if kernels have rows of k in that many groups; `stretch` as of `packed`."""
    each = math.gcd(k // groups, BLOCK, stretch)
    return k % groups == 0 and any(each % unit == 0 for unit in UNITS)


def packed(
    numbers: torch.Tensor,
    zeros: torch.Tensor | int,
    scales: torch.Tensor,
    dtype: torch.dtype,
    stretch: int = 0,
) -> Int4Weight:
    """Packs numbers, uint8 [n, k] of at most 15; zeros, one or [n, groups], and scales [n, groups].

    `stretch`: columns that shall be of whole groups, if any.
    """
    (n, k), groups = numbers.shape, scales.shape[1]
    each = math.gcd(k // groups, BLOCK, stretch)
    scales = scales.repeat_interleave(k // groups // each, 1).t().contiguous()
    unit = next(unit for unit in UNITS if each % unit == 0)
    steps = cdiv(k, PARTS * unit)
    filled = torch.nn.functional.pad(numbers, (0, steps * PARTS * unit - k))
    parts = filled.view(n, steps, PARTS, unit).int()
    words = sum(parts[:, :, part] << 4 * part for part in range(PARTS))
    assert isinstance(words, torch.Tensor)
    shifted: torch.Tensor | None = None
    if not isinstance(zeros, int):
        shifted = (zeros.float() + _BASES[dtype]).to(dtype)
        shifted = shifted.repeat_interleave(k // groups // each, 1).t().contiguous()
    elif zeros != 8:
        shifted = torch.full(scales.shape, _BASES[dtype] + zeros, dtype=dtype, device=scales.device)
    low = torch.where(words < 1 << 15, words, words - (1 << 16)).to(torch.int16)
    return Int4Weight(low.view(n, -1), scales, shifted, k, unit, dtype)


def _assembly(base: str, part: int, scaled: bool) -> str:
    """Two numbers of two words, as two of the type, less the zero points, and times scales: the type's bits
    of the base have the number as the lowest.
    """
    shift, mask = f"shr.b32 $0, $1, {4 * part}; " if part else "", "0x000F000F"
    source = "$0" if part else "$1"
    bits, kind = ("0x43004300", "bf16x2") if base == "bf16" else ("0x64006400", "f16x2")
    times = f" mul.{kind} $0, $0, $3;" if scaled else ""
    return f"{shift}lop3.b32 $0, {source}, {mask}, {bits}, 0xEA; sub.{kind} $0, $0, $2;{times}"


_BF16 = tl.constexpr(tuple(_assembly("bf16", part, False) for part in range(PARTS)))
_FP16 = tl.constexpr(tuple(_assembly("fp16", part, False) for part in range(PARTS)))
_BF16_SCALED = tl.constexpr(tuple(_assembly("bf16", part, True) for part in range(PARTS)))
_FP16_SCALED = tl.constexpr(tuple(_assembly("fp16", part, True) for part in range(PARTS)))


@triton.jit
def base_of(dtype: tl.constexpr):
    """`_BASES` of Triton's types."""
    base: tl.constexpr = 0.0 if dtype == tl.float32 else (128.0 if dtype == tl.bfloat16 else 1024.0)
    return base


@triton.jit
def part_of(words, zeros, part: tl.constexpr):
    """Numbers of words [.., n, unit], less their rows' zero points [.., n], in the type of `zeros`."""
    less = tl.broadcast_to(tl.expand_dims(zeros, -1), words.shape)
    if INTERPRETED or zeros.dtype == tl.float32:
        number = ((words >> 4 * part) & 15).to(tl.float32) + base_of(zeros.dtype)
        made = (number - less.to(tl.float32)).to(zeros.dtype)
    elif zeros.dtype == tl.bfloat16:
        made = tl.inline_asm_elementwise(
            _BF16[part], "=&r,r,r", [words, less], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        made = tl.inline_asm_elementwise(
            _FP16[part], "=&r,r,r", [words, less], dtype=tl.float16, is_pure=True, pack=2
        )
    return made


@triton.jit
def scaled_part_of(words, zeros, scales, part: tl.constexpr):
    """The same, times their rows' scales [n] of that type; rounded."""
    factor = tl.broadcast_to(scales[:, None], words.shape)
    if INTERPRETED or zeros.dtype == tl.float32:
        made = part_of(words, zeros, part).to(tl.float32) * factor.to(tl.float32)
        made = made.to(zeros.dtype)
    else:
        less = tl.broadcast_to(zeros[:, None], words.shape)
        ASM: tl.constexpr = _BF16_SCALED[part] if zeros.dtype == tl.bfloat16 else _FP16_SCALED[part]
        made = tl.inline_asm_elementwise(
            ASM, "=&r,r,r,r", [words, less, factor], dtype=zeros.dtype, is_pure=True, pack=2
        )
    return made


@triton.jit
def parts_of(words, zeros, scales, first: tl.constexpr, count: tl.constexpr):
    """`part_of` of 1, 2 or 4 parts, one after the other: [n, count * unit]; with `scales`, `scaled_part_of`.
    Numbers stay in their threads.
    """
    if count == 1:
        made = part_of(words, zeros, first) if scales is None else scaled_part_of(words, zeros, scales, first)
    else:
        low = parts_of(words, zeros, scales, first, count // 2)
        high = parts_of(words, zeros, scales, first + count // 2, count // 2)
        both = tl.permute(tl.join(low, high), (0, 2, 1))
        made = tl.reshape(both, (words.shape[0], words.shape[1] * count))
    return made


@triton.jit
def eights(like, dtype: tl.constexpr):
    """A zero point of eight per element of `like`."""
    return (tl.full(like.shape, 8.0, tl.float32) + base_of(dtype)).to(dtype)


@kernel
def _widen(words, scales, zeros, out, n, k, width, group, UNIT: tl.constexpr, ROWS: tl.constexpr):
    """Grid (steps, blocks of rows): programs that run together write whole rows."""
    row, step = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0)
    unit, wide = tl.arange(0, UNIT)[None, :], row.to(tl.int64)[:, None]
    read = tl.load(words + wide * width + step * UNIT + unit, mask=(row < n)[:, None], other=0)
    for part in tl.static_range(4):
        first = (step * 4 + part) * UNIT
        place, there = first // group * n + row, (row < n) & (first < k)
        if zeros is None:
            zero = eights(row, out.dtype.element_ty)
        else:
            zero = tl.load(zeros + place, mask=there, other=0.0)
        scale = tl.load(scales + place, mask=there, other=0.0).to(tl.float32)
        made = part_of(read, zero, part).to(tl.float32) * scale[:, None]
        at = out + wide * k + first + unit
        tl.store(at, made.to(out.dtype.element_ty), mask=there[:, None])
