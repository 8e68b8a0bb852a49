"""Keys and values in e4m3 as operands of the matrix unit, in few instructions, from words of two neighbours.

Keys become float16, of which one instruction makes two. Values become bfloat16, whose range their weights
need, scales included: bits are moved to where that type has such bits, which gives a power of 2 times the
number, exactly, also where either is subnormal. No number moves to another thread, so each is two operands of
half the columns: of keys the first and the second of every two words, of values the low and the high bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eyas.engine.kernels.launch.launching import INTERPRETED

_LIFT = tl.constexpr(2.0**60)  # the root of what makes up for moved bits: no number of 32 bits holds both

_KEYS = tl.constexpr(
    tuple(f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.rn.f16x2.e4m3x2 $0, {half}; }}" for half in "lh")
)
_VALUES = tl.constexpr(
    (
        "{ .reg .b32 s, t; and.b32 t, $1, 0x007F007F; shl.b32 t, t, 4; shl.b32 s, $1, 8; "
        "lop3.b32 $0, s, 0x80008000, t, 0xEA; }",
        "{ .reg .b32 t; and.b32 t, $1, 0x7F007F00; shr.u32 t, t, 4; lop3.b32 $0, $1, 0x80008000, t, 0xEA; }",
    )
)


@triton.jit
def in_units(q_tile):
    """Queries [n, dim] in units of a power of 2 each [n], as numbers of the type that keys become.

    Rows of 32 bits stay as they are.
    """
    unit = tl.full([q_tile.shape[0]], 1.0, tl.float32)
    small = q_tile
    if q_tile.dtype != tl.float32:
        wide = q_tile.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(wide), 1), 1e-12)
        exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
        unit = exponent.to(tl.float32, bitcast=True)
        small = (wide * (0x7F000000 - exponent).to(tl.float32, bitcast=True)[:, None]).to(tl.float16)
    return small, unit


@triton.jit
def query_parts(q_tile):
    """Queries [n, dim] as two of half the columns, which meet the two of `key_part`."""
    n: tl.constexpr = q_tile.shape[0]
    half: tl.constexpr = q_tile.shape[1] // 2
    first, second = tl.split(tl.permute(tl.reshape(q_tile, (n, half // 2, 2, 2)), (0, 1, 3, 2)))
    return tl.reshape(first, (n, half)), tl.reshape(second, (n, half))


@triton.jit
def key_part(words, PART: tl.constexpr, like):
    """The first or the second of every two words uint16 [n, dim / 2], as keys [n, dim / 2] like `like`."""
    if INTERPRETED or like.dtype == tl.float32:
        word = tl.split(tl.reshape(words, (words.shape[0], words.shape[1] // 2, 2)))[PART]
        made = tl.reshape(tl.join(_number(word & 255, like), _number(word >> 8, like)), words.shape)
    else:
        made = tl.inline_asm_elementwise(_KEYS[PART], "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    return made


@triton.jit
def value_part(words, PART: tl.constexpr, like):
    """The low or the high bytes of words uint16 [n, dim / 2], as `_LIFT` ** -2 times the values."""
    if like.dtype == tl.float32:
        byte = (words >> 8 * PART).to(tl.uint32)
        made = ((byte & 128) << 24 | (byte & 127) << 20).to(tl.float32, bitcast=True)
    else:
        made = tl.inline_asm_elementwise(
            _VALUES[PART], "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return made


@triton.jit
def weighed(weights, scales, like):
    """Weights float32 [m, n] times the scales [n] of values, for `value_part`; `like`: the queries."""
    made = weights * (scales * _LIFT)[None, :]
    if not (INTERPRETED or like.dtype == tl.float32):
        made = made.to(tl.bfloat16)
    return made


@triton.jit
def lifted(acc):
    """Sums of products of `weighed` and `value_part`, as they are meant."""
    return acc * _LIFT


@triton.jit
def _number(byte, like):
    return byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(like.dtype)
