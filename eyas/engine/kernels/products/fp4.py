"""Numbers of four bits in floating point (e2m1) as products read them: four in a word, widened in registers.

A number is a sign, two bits of exponent and one of mantissa, and 32 columns of a row have one scale, a power
of two (OCP MX, MXFP4). A word holds the numbers of four columns that are 32 apart, so that each is an operand
of the matrix unit where the word lies. Bits of a number stand as far apart as in bfloat16, or nearly so: a
rotation, or a multiplication, and a mask make one of it that is 2 ** 126 times too small. A multiplication by
the group's scale, times that, mends both and is exact: products need no scale behind them. Threads hold words
in pairs, which rotate as one, so that two signs of a word are its neighbour's.

In NVFP4 16 columns have one scale, of three bits of mantissa, whose product with a number is exact as well;
columns are 16 apart then, and each row of the matrix has a factor behind the product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.launching import INTERPRETED, kernel
from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.kernels.products.packed import PackedWeight
from eyas.engine.kernels.products.skinny_tiles import PackedStep

PARTS = 4
"""Numbers in a word."""

UNIT = 32
"""Columns between two numbers of a word, and those that have one scale: of MXFP4."""

UNIT_OF_16 = 16
"""The same of NVFP4."""

LARGEST = 1
"""The exponent of the largest scale: with the power of two above, bfloat16 has no larger one."""

_LOWEST, _TOP = -9, 8  # exponents of NVFP4's scales: of the smallest one that is not zero, and of the largest
_ROWS = 32  # that a program widens
_LIFT = 126  # by which exponents of scales are stored: 127, and 126 more, less the 127 of bfloat16


@dataclass(frozen=True)
class Fp4Weight(PackedWeight):
    """A matrix [n, k], or one for each expert, [experts, n, k].

    `words`: int16 [n, steps * unit], a step being four units of columns; of experts [experts, steps, n,
    unit]. `scales`: int32 [..., steps, n], the four scales of a row's step, a byte each, the first lowest:
    exponents, plus 253; of NVFP4 exponents, plus 9, above three bits of mantissa. `factors`: float32
    [..., n], of NVFP4; None: it is MXFP4.
    """

    words: torch.Tensor
    scales: torch.Tensor
    columns: int
    dtype: torch.dtype
    factors: torch.Tensor | None = None

    @property
    def unit(self) -> int:
        """Columns between two numbers of a word."""
        return UNIT if self.factors is None else UNIT_OF_16

    @property
    def step(self) -> PackedStep:
        return PackedStep("fp4", self.unit, PARTS, self.words.element_size())

    @property
    def together(self) -> int:
        return self.step.columns

    @property
    def beside(self) -> torch.Tensor | None:
        return self.factors

    def room(self, count: int) -> Fp4Weight:
        words, scales = (each.new_empty(count, *each.shape) for each in (self.by_steps(), self.scales))
        factors = None if self.factors is None else self.factors.new_empty(count, *self.factors.shape)
        return replace(self, words=words, scales=scales, factors=factors)

    def put(self, place: int, part: Fp4Weight) -> None:
        self.words[place].copy_(part.by_steps())
        self.scales[place].copy_(part.scales)
        if self.factors is not None and part.factors is not None:
            self.factors[place].copy_(part.factors)

    def below(self, lower: Fp4Weight) -> Fp4Weight:
        words, scales = torch.cat((self.words, lower.words)), torch.cat((self.scales, lower.scales), 1)
        both = (self.factors, lower.factors)
        factors = None if self.factors is None else torch.cat([each for each in both if each is not None])
        return replace(self, words=words, scales=scales, factors=factors)

    def in_order(self, rows: torch.Tensor) -> Fp4Weight:
        factors = None if self.factors is None else self.factors[rows]
        return replace(
            self, words=self.words[rows], scales=self.scales[:, rows].contiguous(), factors=factors
        )

    def widened(self) -> torch.Tensor:
        n, k = self.shape
        out = torch.empty(n, k, dtype=self.dtype, device=self.words.device)
        sizes, grid = (n, k, self.words.shape[1]), (cdiv(k, self.step.columns), cdiv(n, _ROWS))
        _widen[grid](
            self.words, self.scales, self.factors, out, *sizes, UNIT=self.unit, ROWS=_ROWS, num_warps=4
        )
        return out


def packed(numbers: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> Fp4Weight:
    """Packs e2m1 numbers, uint8 [n, k], and their scales' exponents, int32 [n, k / 32], up to LARGEST."""
    scales = _in_steps((exponents.int() + 127 + _LIFT).to(torch.uint8))
    return Fp4Weight(_words(numbers, UNIT), scales, numbers.shape[1], dtype)


def packed_of_16(
    numbers: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype
) -> Fp4Weight:
    """Packs NVFP4: numbers uint8 [n, k], scales in FP8 (e4m3) [n, k / 16], and the matrix's factor, [1]."""
    mantissa, exponent = torch.frexp(scales.float())  # of 0.5 to 1
    codes = (exponent - 1 - _LOWEST << 3) + (mantissa * 16).to(torch.int32) - 8
    zero = scales.float() == 0
    numbers = numbers.masked_fill(zero.repeat_interleave(UNIT_OF_16, 1), 0)
    bytes_ = codes.masked_fill(zero, 0).to(torch.uint8)
    factors = (factor.float() * 2.0**_TOP).expand(len(numbers)).contiguous()
    return Fp4Weight(_words(numbers, UNIT_OF_16), _in_steps(bytes_), numbers.shape[1], dtype, factors)


def _words(numbers: torch.Tensor, unit: int) -> torch.Tensor:
    n, k = numbers.shape
    steps = cdiv(k, PARTS * unit)
    filled = torch.nn.functional.pad(numbers, (0, steps * PARTS * unit - k)).view(n, steps, PARTS, unit).int()
    first, second, third, last = filled.unbind(2)
    words = (first & 8) << 12 | (first & 7) << 6 | (second & 7) << 9 | (third & 7) << 12
    words |= _of_neighbours((second & 8) >> 1 | (third & 8) << 2)
    words |= (last & 3) << 3 | (last & 4) >> 2 | (last & 8) >> 2
    return torch.where(words < 1 << 15, words, words - (1 << 16)).to(torch.int16).view(n, -1)


def _in_steps(scales: torch.Tensor) -> torch.Tensor:
    """Scales uint8 [n, groups] -> int32 [steps, n]."""
    steps = cdiv(scales.shape[1], PARTS)
    four = torch.nn.functional.pad(scales, (0, steps * PARTS - scales.shape[1])).view(torch.int32)
    return four.t().contiguous()


def _of_neighbours(words: torch.Tensor) -> torch.Tensor:
    """Each word's neighbour in its pair."""
    turned: torch.Tensor = words.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return turned


_SIGN_AND_REST = "0x81C081C0"
_MASKED = (
    f"and.b32 $0, $1, {_SIGN_AND_REST}; ",
    f"shf.r.wrap.b32 $0, $1, $1, 3; and.b32 $0, $0, {_SIGN_AND_REST}; ",
    f"shf.r.wrap.b32 $0, $1, $1, 6; and.b32 $0, $0, {_SIGN_AND_REST}; ",
    f"and.b32 $0, $1, 0x001B001B; mul.lo.u32 $0, $0, 0x4108; and.b32 $0, $0, {_SIGN_AND_REST}; ",
)
_HALF = ("low", "high", "low", "high")
_BF16 = tl.constexpr(
    tuple(
        "{ .reg .b16 low, high; .reg .b32 twice; "
        f"{masked} mov.b32 {{low, high}}, $2; mov.b32 twice, {{{half}, {half}}}; mul.bf16x2 $0, $0, twice; }}"
        for masked, half in zip(_MASKED, _HALF, strict=True)
    )
)
_FACTORS = tl.constexpr(
    tuple(f"prmt.b32 $0, $1, 0, {each}; shr.b32 $0, $0, 1;" for each in ("0x1404", "0x3424"))
)


@triton.jit
def factors_of(scales, pair: tl.constexpr, unit: tl.constexpr = 32):
    """The factors of two parts, of four scales of each row, int32 [n]: a bfloat16 in each half. Those of
    NVFP4 are 2 ** 8 times too small: bfloat16 has no larger ones.
    """
    if unit == 16:
        bits = scales >> 16 * pair
        return (((bits & 255) << 4) | ((bits & 0xFF00) << 12)) + 0x76007600
    elif INTERPRETED:
        bits = scales >> 16 * pair
        return ((bits & 255) << 7) | ((bits & 0xFF00) << 15)
    else:
        return tl.inline_asm_elementwise(
            _FACTORS[pair], "=r,r", [scales], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def part_of(words, factors, part: tl.constexpr, dtype: tl.constexpr):
    """Numbers of words [n, unit] times their rows' factors [n]: [n, unit] in a type."""
    each = tl.broadcast_to(factors[:, None], words.shape)
    if INTERPRETED or dtype != tl.bfloat16:
        number = _bits_of(words.to(tl.int32), part).to(tl.float32, bitcast=True)
        factor = (each >> 16) << 16 if part % 2 else each << 16
        made = (number * factor.to(tl.float32, bitcast=True)).to(dtype)
    else:
        made = tl.inline_asm_elementwise(
            _BF16[part], "=r,r,r,r", [words, each], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return made


@triton.jit
def _bits_of(words, part: tl.constexpr):
    """The bits of numbers of words [n, unit] as float32 has them, int32."""
    if part == 0:
        return ((words & 0x8000) << 16) | ((words & 0x01C0) << 16)
    elif part == 3:
        return ((words & 2) << 30) | ((words & 1) << 24) | ((words & 24) << 19)
    else:
        low, high = tl.split(tl.reshape(words, (words.shape[0], words.shape[1] // 2, 2)))
        signs = tl.reshape(tl.join(high, low), words.shape)
        return (((signs << 32 - 3 * part) >> 31) << 31) | ((words << 16 - 3 * part) & 0x01C00000)


@triton.jit
def parts_of(words, scales, first: tl.constexpr, count: tl.constexpr, dtype: tl.constexpr):
    """The same of 1, 2 or 4 parts, one after the other: [n, count * unit]. Numbers stay in their threads."""
    if count == 1:
        made = part_of(words, factors_of(scales, first // 2, words.shape[1]), first, dtype)
    else:
        low = parts_of(words, scales, first, count // 2, dtype)
        high = parts_of(words, scales, first + count // 2, count // 2, dtype)
        both = tl.permute(tl.join(low, high), (0, 2, 1))
        made = tl.reshape(both, (words.shape[0], words.shape[1] * count))
    return made


@kernel
def _widen(words, scales, factors, out, n, k, width, UNIT: tl.constexpr, ROWS: tl.constexpr):
    """Grid (steps, blocks of rows): programs that run together write whole rows."""
    row, step = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0)
    unit, wide = tl.arange(0, UNIT)[None, :], row.to(tl.int64)[:, None]
    read = tl.load(words + wide * width + step * UNIT + unit, mask=(row < n)[:, None], other=0)
    four = tl.load(scales + step * n + row, mask=row < n, other=0)
    for part in tl.static_range(4):
        first = (step * 4 + part) * UNIT
        made = part_of(read, factors_of(four, part // 2, UNIT), part, out.dtype.element_ty)
        if factors is not None:
            made = made.to(tl.float32) * tl.load(factors + row, mask=row < n, other=0.0)[:, None]
        at = out + wide * k + first + unit
        tl.store(at, made.to(out.dtype.element_ty), mask=((row < n) & (first < k))[:, None])
