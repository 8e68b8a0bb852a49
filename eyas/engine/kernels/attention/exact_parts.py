"""The one order in which exact attention adds up a row's keys, whichever kernel does it, and beside whom.

Keys stand in columns: a row's ancestors in order, so that the column is the position. Columns are taken in
blocks of `BLOCK` at multiples of it; blocks are added up from left to right within a part; parts, whose
bounds are fixed columns too, are merged from left to right. A block or a part that a row does not see changes
nothing, to the bit. How many columns a program takes is free.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

BLOCK = tl.constexpr(64)
UNSEEN = tl.constexpr(-1.0e30)  # finite: what a query does not see then weighs nothing, wherever it stands
_ONES = tl.constexpr(16)  # columns of the product that adds up weights: the least that every GPU takes


@dataclass(frozen=True)
class PartSizes:
    """Parts grow with their place, so that short rows have several and long ones not too many: of `near`
    columns up to column `near_end`, of `middle` up to `middle_end`, then of `far`. All are multiples of 64.
    """

    near: int = 128
    near_end: int = 2048
    middle: int = 512
    middle_end: int = 16384
    far: int = 2048

    @property
    def near_parts(self) -> int:
        """The number of parts before the first of the middle."""
        return self.near_end // self.near

    @property
    def middle_parts(self) -> int:
        """The number of parts before the first of the far ones."""
        return self.near_parts + (self.middle_end - self.near_end) // self.middle

    def of(self, columns: int) -> int:
        """The number of parts in which that many columns lie."""
        near = -(-min(columns, self.near_end) // self.near)
        middle = -(-max(min(columns, self.middle_end) - self.near_end, 0) // self.middle)
        return near + middle + -(-max(columns - self.middle_end, 0) // self.far)


@triton.jit
def part_at(column, layout: tl.constexpr):
    """The part that holds a column. Triton 3.6 takes no `PartSizes` as an argument, but those of a layout."""
    near = column // layout.parts.near
    middle = layout.parts.near_parts + (column - layout.parts.near_end) // layout.parts.middle
    far = layout.parts.middle_parts + (column - layout.parts.middle_end) // layout.parts.far
    behind = tl.where(column < layout.parts.middle_end, middle, far)
    return tl.where(column < layout.parts.near_end, near, behind)


@triton.jit
def part_from(column, layout: tl.constexpr):
    """The first part that begins at a column or behind it."""
    return tl.where(column > 0, part_at(column - 1, layout) + 1, 0)


@triton.jit
def part_begin(part, layout: tl.constexpr):
    """The first column of a part."""
    near = part * layout.parts.near
    middle = layout.parts.near_end + (part - layout.parts.near_parts) * layout.parts.middle
    far = layout.parts.middle_end + (part - layout.parts.middle_parts) * layout.parts.far
    behind = tl.where(part < layout.parts.middle_parts, middle, far)
    return tl.where(part < layout.parts.near_parts, near, behind)


@triton.jit
def begins_part(column, layout: tl.constexpr):
    """True if a part begins at that column."""
    return part_begin(part_at(column, layout), layout) == column


@triton.jit
def nothing(TILE: tl.constexpr, DIM: tl.constexpr):
    """The softmax over no keys: weighted values [tile, dim], the greatest score [tile], the weights' sum."""
    acc = tl.full([TILE, DIM], 0.0, tl.float32)
    return acc, tl.full([TILE], UNSEEN, tl.float32), tl.full([TILE], 0.0, tl.float32)


@triton.jit
def none_of_part(TILE: tl.constexpr, DIM: tl.constexpr):
    """An empty result for `add_block`, like `nothing`: its sum stands in several equal columns."""
    acc, peak, _ = nothing(TILE, DIM)
    return acc, peak, tl.full([TILE, _ONES], 0.0, tl.float32)


@triton.jit
def add_block(acc, peak, total, scores, v):
    """The softmax so far with one block more: scores [tile, 64] to the base 2, UNSEEN where a row sees not.

    The matrix unit adds up the weights as it adds weighted values, since its order follows nothing.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None]).to(v.dtype)
    rescale = tl.exp2(peak - new_peak)[:, None]
    ones = tl.full([scores.shape[1], _ONES], 1.0, v.dtype)
    total = tl.dot(weights, ones, total * rescale, input_precision="ieee")
    return tl.dot(weights, v, acc * rescale, input_precision="ieee"), new_peak, total


@triton.jit
def merged(acc, peak, total, part_acc, part_peak, part_total):
    """The softmax over the parts so far and the next one; sums are [tile]."""
    new_peak = tl.maximum(peak, part_peak)
    rescale, added = tl.exp2(peak - new_peak), tl.exp2(part_peak - new_peak)
    acc = acc * rescale[:, None] + part_acc * added[:, None]
    return acc, new_peak, total * rescale + part_total * added


@triton.jit
def leave(accs, peaks, totals, place, acc, peak, total, real, layout: tl.constexpr):
    """Puts a softmax where others find it."""
    dim = tl.arange(0, layout.dim)[None, :]
    tl.store(accs + place.to(tl.int64)[:, None] * layout.dim + dim, acc, mask=real[:, None])
    tl.store(peaks + place, peak, mask=real)
    tl.store(totals + place, total, mask=real)


@triton.jit
def left(accs, peaks, totals, place, real, layout: tl.constexpr):
    """Loads what `leave` stored, past L1, which does not see the stores of other SMs."""
    dim = tl.arange(0, layout.dim)[None, :]
    at = accs + place.to(tl.int64)[:, None] * layout.dim + dim
    acc = tl.load(at, mask=real[:, None], other=0.0, cache_modifier=".cg")
    peak = tl.load(peaks + place, mask=real, other=UNSEEN, cache_modifier=".cg")
    return acc, peak, tl.load(totals + place, mask=real, other=0.0, cache_modifier=".cg")
