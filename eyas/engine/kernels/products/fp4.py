"""Numbers of four bits in floating point (e2m1) as products read them: four in a word, widened in registers.

A number is a sign, two bits of exponent and one of mantissa, and 32 columns of a row have one scale, a power
of two (OCP MX, MXFP4). A word holds the numbers of four columns that are 32 apart, so that each is an operand
of the matrix unit where the word lies. Bits of a number stand as far apart as in bfloat16, or nearly so: a
rotation, or a multiplication, and a mask make one of it that is 2 ** 126 times too small. A multiplication by
the group's scale, times that, mends both and is exact: products need no scale behind them. Threads hold words
in pairs, which rotate as one, so that two signs of a word are its neighbour's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.sizes import cdiv

PARTS = 4
"""Numbers in a word."""

UNIT = 32
"""Columns between two numbers of a word, and those that have one scale."""

STEP = PARTS * UNIT
"""Columns of UNIT words."""

LARGEST = 1
"""The exponent of the largest scale: with the power of two above, bfloat16 has no larger one."""

_LIFT = 126  # by which exponents of scales are stored: 127, and 126 more, less the 127 of bfloat16
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # it has no assembler


@dataclass(frozen=True)
class Fp4Weight:
    """A matrix [n, k], or one for each expert, [experts, n, k].

    `words`: int16 [..., n, steps * 32], a step being 128 columns. `scales`: int32 [..., steps, n], the four
    exponents of a row's step, plus 253, a byte each, the first one lowest. `dtype`: of what it multiplies.
    """

    words: torch.Tensor
    scales: torch.Tensor
    columns: int
    dtype: torch.dtype

    @property
    def zeros(self) -> None:
        """There are no zero points."""

    @property
    def unit(self) -> int:
        """Columns between two numbers of a word."""
        return UNIT

    @property
    def shape(self) -> torch.Size:
        """[n, k], or [experts, n, k]."""
        return torch.Size((*self.words.shape[:-1], self.columns))

    def room(self, count: int) -> Fp4Weight:
        """Room for as many of these."""
        words, scales = (each.new_empty(count, *each.shape) for each in (self.words, self.scales))
        return Fp4Weight(words, scales, self.columns, self.dtype)

    def put(self, place: int, part: Fp4Weight) -> None:
        """Puts another one into its place of `room`."""
        self.words[place].copy_(part.words)
        self.scales[place].copy_(part.scales)

    def below(self, lower: Fp4Weight) -> Fp4Weight:
        """A matrix with another of this width and type below it."""
        words, scales = torch.cat((self.words, lower.words)), torch.cat((self.scales, lower.scales), 1)
        return Fp4Weight(words, scales, self.columns, self.dtype)

    def in_order(self, rows: torch.Tensor) -> Fp4Weight:
        """Its rows, int64 [n], in this order."""
        return Fp4Weight(self.words[rows], self.scales[:, rows].contiguous(), self.columns, self.dtype)


def packed(numbers: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> Fp4Weight:
    """Packs e2m1 numbers, uint8 [n, k], and their scales' exponents, int32 [n, k / 32], up to LARGEST."""
    n, k = numbers.shape
    steps = cdiv(k, STEP)
    filled = torch.nn.functional.pad(numbers, (0, steps * STEP - k)).view(n, steps, PARTS, UNIT).int()
    first, second, third, last = filled.unbind(2)
    words = (first & 8) << 12 | (first & 7) << 6 | (second & 7) << 9 | (third & 7) << 12
    words |= _of_neighbours((second & 8) >> 1 | (third & 8) << 2)
    words |= (last & 3) << 3 | (last & 4) >> 2 | (last & 8) >> 2
    low = torch.where(words < 1 << 15, words, words - (1 << 16)).to(torch.int16)
    bytes_ = (exponents.int() + 127 + _LIFT).to(torch.uint8)
    four = torch.nn.functional.pad(bytes_, (0, steps * PARTS - bytes_.shape[1])).view(torch.int32)
    return Fp4Weight(low.view(n, -1), four.t().contiguous(), k, dtype)


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
def factors_of(scales, pair: tl.constexpr):
    """The factors of two parts, of four exponents of each row, int32 [n]: a bfloat16 in each half."""
    if _INTERPRETED:
        bits = scales >> 16 * pair
        return ((bits & 255) << 7) | ((bits & 0xFF00) << 15)
    else:
        return tl.inline_asm_elementwise(
            _FACTORS[pair], "=r,r", [scales], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def part_of(words, factors, part: tl.constexpr, dtype: tl.constexpr):
    """Numbers of words [n, 32] times their rows' factors [n]: [n, 32] in a type."""
    each = tl.broadcast_to(factors[:, None], words.shape)
    if _INTERPRETED or dtype != tl.bfloat16:
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
    """The bits of numbers of words [n, 32] as float32 has them, int32."""
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
    """The same of 1, 2 or 4 parts, one after the other: [n, count * 32]. Numbers stay in their threads."""
    if count == 1:
        made = part_of(words, factors_of(scales, first // 2), first, dtype)
    else:
        low = parts_of(words, scales, first, count // 2, dtype)
        high = parts_of(words, scales, first + count // 2, count // 2, dtype)
        both = tl.permute(tl.join(low, high), (0, 2, 1))
        made = tl.reshape(both, (words.shape[0], words.shape[1] * count))
    return made
