"""The keys and values of one of `attend`'s programs, in FP8: nothing is multiplied by a scale but scores.

The matrix unit takes the stored numbers as they are, in 16 bits, which hold them exactly. A key's scale is a
factor of its scores. A value's is a part of its weight: its base 2 logarithm is added to the scores of which
the peak is taken, so that weights stay below 1; the weights' sum takes it out again. Values are read in pairs
of neighbours, since the matrix unit is fed by transposing units of 16 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eyas.engine.kernels.attention.attend_masks import UNSEEN, lowest_of, masked
from eyas.engine.kernels.attention.paged import pages_of, scales_of
from eyas.engine.kernels.attention.scores import tanh

_LEAST = tl.constexpr(1e-33)  # of a scale: a row that was never written has 0


@triton.jit
def over_scaled_part(
    q_tile, sees, keys, values, head, table, start, low, edge, first, last, scale, layout: tl.constexpr
):  # fmt: skip
    """As `attend._over_part`. keys and values point at the pool's first rows, of all heads."""
    q_small, unit = _in_units(q_tile)
    key_at = keys + head * layout.dim + tl.arange(0, layout.dim)[None, :]
    pair = head * (layout.dim // 2) + tl.arange(0, layout.dim // 2)[None, :]
    pair_at = values.to(tl.pointer_type(tl.uint16)) + pair
    scales = scales_of(keys, head, layout)
    peak = tl.full([layout.tile], UNSEEN, tl.float32)
    total = tl.full([layout.tile], 0.0, tl.float32)
    even = tl.full([layout.tile, layout.dim // 2], 0.0, tl.float32)
    odd = tl.full([layout.tile, layout.dim // 2], 0.0, tl.float32)
    lowest = lowest_of(sees, start, low, edge, layout)
    row = first + tl.arange(0, layout.keys)
    pages = pages_of(table, row, last, layout.page_size)
    beside = _pages_beside(table, row, last, layout)
    for block in range(first, last, layout.keys):
        row = block + tl.arange(0, layout.keys)
        inside = row < last
        if layout.narrow:
            inside = inside & (row >= low)
        at = pages * layout.page_stride + (row % layout.page_size)[:, None] * layout.row_stride
        scale_at = scales + beside * (layout.page_stride // 4)
        pages = pages_of(table, row + layout.keys, last, layout.page_size)  # ahead of the rows they lead to
        beside = _pages_beside(table, row + layout.keys, last, layout)
        k = tl.load(key_at + at, mask=inside[:, None], other=0.0)
        v = tl.load(pair_at + at // 2, mask=inside[:, None], other=0)
        key_scale = tl.load(scale_at + _place(row, 0, layout), mask=inside[None, :], other=0.0)
        value_scale = tl.load(scale_at + _place(row, 1, layout), mask=inside[None, :], other=1.0)
        value_scale = tl.maximum(value_scale, _LEAST)
        scores = tl.dot(q_small, tl.trans(k.to(q_small.dtype)), input_precision="ieee")
        scores *= (unit * scale)[:, None] * key_scale
        if layout.ceiling > 0:
            scores = tanh(scores) * layout.ceiling
        scores = masked(scores + tl.log2(value_scale), row, inside, sees, lowest, start, block, layout)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        rescale = tl.exp2(peak - new_peak)
        total = total * rescale + tl.sum(weights / value_scale, 1)
        small = weights.to(q_small.dtype)
        even = tl.dot(small, _number(v & 255, q_small), even * rescale[:, None], input_precision="ieee")
        odd = tl.dot(small, _number(v >> 8, q_small), odd * rescale[:, None], input_precision="ieee")
        peak = new_peak
    acc = tl.reshape(tl.join(even, odd), (layout.tile, layout.dim))
    return acc / total[:, None], peak + tl.log2(total)


@triton.jit
def _in_units(q_tile):
    """Queries [tile, dim] in units of a power of 2 each [tile], as numbers of 16 bits that hold those of FP8.

    Rows of 32 bits stay as they are.
    """
    if q_tile.dtype == tl.float32:
        unit = tl.full([q_tile.shape[0]], 1.0, tl.float32)
        small = q_tile
    else:
        wide = q_tile.to(tl.float32)
        unit = tl.exp2(tl.floor(tl.log2(tl.maximum(tl.max(tl.abs(wide), 1), 1e-30))))
        small = (wide / unit[:, None]).to(tl.float16)
    return small, unit


@triton.jit
def _number(stored, like):
    """Bytes of e4m3 as numbers of the type of `like`."""
    return stored.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(like.dtype)


@triton.jit
def _pages_beside(table, row, end, layout: tl.constexpr):
    """The pages, int64 [1, n], as `pages_of` gives them in a column."""
    return tl.load(table + row // layout.page_size, mask=row < end, other=0).to(tl.int64)[None, :]


@triton.jit
def _place(row, FIELD: tl.constexpr, layout: tl.constexpr):
    """The places [1, n], within a page, of the scales of keys (FIELD 0) or values (1)."""
    EACH: tl.constexpr = layout.dim // 4  # scales of a head in a row of scales
    number = (FIELD * layout.page_size + row % layout.page_size)[None, :]
    return number // EACH * (layout.row_stride // 4) + number % EACH
