"""The keys of a sequence, as exact attention meets them in the paged pool, part by part.

It finds the key of each column, along a path where queries stand in a tree, and hides what a query does not
see. The order in which blocks are added is `exact_parts`'s; who takes which part is its callers' business.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from eyas.engine.kernels.attention.exact_parts import (
    BLOCK,
    UNSEEN,
    PartSizes,
    add_block,
    begins_part,
    leave,
    merged,
    none_of_part,
    part_at,
)
from eyas.engine.kernels.attention.paged import pages_of, read_rows
from eyas.engine.kernels.attention.scores import tanh


@dataclass(frozen=True)
class BlockLayout:
    """The kernels' compile-time parameters.

    `tree`: queries meet behind their start by `words` of a mask; `paths`: columns from the start on are found
    along a query's path.
    """

    width: int
    words: int
    heads: int
    kv_heads: int
    dim: int
    page_size: int
    page_stride: int
    tile: int
    shares: int
    pdl: bool
    window: int
    ceiling: float
    chunk: int
    parts: PartSizes
    paths: bool = False

    @property
    def tree(self) -> bool:
        """True if queries meet the rows of a tree behind their start."""
        return self.words > 0

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Rows that meet one key head: queries times the heads of its group."""
        return self.width * self.group

    @property
    def tiles(self) -> int:
        """The number of tiles of the query rows."""
        return -(-self.rows // self.tile)

    @property
    def row_stride(self) -> int:
        """Elements from one cached row to the next."""
        return self.kv_heads * self.dim

    @property
    def two_loops(self) -> bool:
        """True if blocks that every query sees whole have a loop without masks: of few rows, one loop is
        sooner at its first keys.
        """
        return self.tile > 16 and not self.narrow

    @property
    def narrow(self) -> bool:
        """True if there are columns before a query's own that it does not see."""
        return self.window > 0 or self.chunk > 0


@triton.jit
def over_columns(
    acc, peak, total, q_tile, own, sees, keys, values, scales, table, start, low, first, last, there, scale,
    leaves, accs, peaks, totals, place, apart, real, layout: tl.constexpr,
):  # fmt: skip
    """The softmax so far with the columns first .. last - 1, where `first` begins a part, or is the block of
    `low`. If `leaves`, each part is left on its own instead, at `place` [tile] and `apart` further for each.

    own [tile]: each query's own column, from `start` on. keys and values point at [1, dim] of the pool's
    first row, scales at the head's first; rows below `there` are in it. sees: where a mask's words begin, if
    columns lie along a path.
    """
    part_acc, part_peak, part_total = none_of_part(layout.tile, layout.dim)
    masked = first
    if layout.two_loops:
        masked = tl.minimum(tl.maximum(start // BLOCK * BLOCK, first), last)  # below, every query sees all
        if first < masked:  # where there are no blocks, none of their pages is waited for
            acc, peak, total, part_acc, part_peak, part_total = _blocks(
                acc, peak, total, part_acc, part_peak, part_total,
                q_tile, own, sees, keys, values, scales, table, start, low, first, first, masked, there,
                scale, leaves, accs, peaks, totals, place, apart, real, False, layout,
            )  # fmt: skip
    if masked < last:
        acc, peak, total, part_acc, part_peak, part_total = _blocks(
            acc, peak, total, part_acc, part_peak, part_total,
            q_tile, own, sees, keys, values, scales, table, start, low, first, masked, last, there, scale,
            leaves, accs, peaks, totals, place, apart, real, True, layout,
        )  # fmt: skip
    if first < last:
        acc, peak, total = _with_part(
            acc, peak, total, part_acc, part_peak, part_total,
            leaves, accs, peaks, totals, place + part_at(last - 1, layout) * apart, real, layout,
        )  # fmt: skip
    return acc, peak, total


@triton.jit
def _blocks(
    acc, peak, total, part_acc, part_peak, part_total,
    q_tile, own, sees, keys, values, scales, table, start, low, first, begin, end, there, scale,
    leaves, accs, peaks, totals, place, apart, real, MASKED: tl.constexpr, layout: tl.constexpr,
):  # fmt: skip
    """The blocks begin .. end - 1 of a sequence's from `first` on, and the part so far that the last of them
    lies in.

    One loop goes through all parts, so that the next block's keys are on their way while a part ends. A part
    ends as the next one begins: where its results were read in the iteration that makes them, the compiler
    (Triton 3.6) would not wait for the matrix unit.
    """
    row = rows_at(begin + tl.arange(0, BLOCK), sees, start, layout)
    pages = pages_of(table, row, there, layout.page_size)
    for block in range(begin, end, BLOCK):
        column = block + tl.arange(0, BLOCK)
        at = pages * layout.page_stride + (row % layout.page_size)[:, None] * layout.row_stride
        here, now = pages, row
        row = rows_at(column + BLOCK, sees, start, layout)  # ahead of the keys they lead to
        pages = pages_of(table, row, there, layout.page_size)
        if MASKED:
            inside = column < end
            if layout.narrow:
                inside = inside & (column >= low)
            k = read_rows(keys, at, scales, here, now, inside[:, None], 0, q_tile, layout)
            v = read_rows(values, at, scales, here, now, inside[:, None], 1, q_tile, layout)
            seen = inside[None, :] & (column[None, :] <= own[:, None])
            if layout.window > 0:
                seen = seen & (column[None, :] > own[:, None] - layout.window)
            if layout.chunk > 0:
                seen = seen & (column[None, :] >= own[:, None] // layout.chunk * layout.chunk)
            scores = tl.where(seen, _scores(q_tile, k, scale, layout), UNSEEN)
        else:
            k = read_rows(keys, at, scales, here, now, None, 0, q_tile, layout)
            v = read_rows(values, at, scales, here, now, None, 1, q_tile, layout)
            scores = _scores(q_tile, k, scale, layout)
        if begins_part(block, layout) & (block > first):
            acc, peak, total = _with_part(
                acc, peak, total, part_acc, part_peak, part_total,
                leaves, accs, peaks, totals, place + part_at(block - 1, layout) * apart, real, layout,
            )  # fmt: skip
            part_acc, part_peak, part_total = none_of_part(layout.tile, layout.dim)
        part_acc, part_peak, part_total = add_block(part_acc, part_peak, part_total, scores, v)
    return acc, peak, total, part_acc, part_peak, part_total


@triton.jit
def _with_part(
    acc, peak, total, part_acc, part_peak, part_total, leaves, accs, peaks, totals, place, real,
    layout: tl.constexpr,
):  # fmt: skip
    """The softmax so far with a part, or, if `leaves`, without it: then it is left at `place`."""
    part_sum = tl.max(part_total, 1)
    if leaves:
        leave(accs, peaks, totals, place, part_acc, part_peak, part_sum, real, layout)
    else:
        acc, peak, total = merged(acc, peak, total, part_acc, part_peak, part_sum)
    return acc, peak, total


@triton.jit
def _scores(q_tile, k, scale, layout: tl.constexpr):
    """Base 2 scores: the product is scaled and rounded before anything is taken from it."""
    scores = tl.dot(q_tile, tl.trans(k), input_precision="ieee") * scale
    if layout.ceiling > 0:
        scores = tanh(scores) * layout.ceiling
    return scores


@triton.jit
def rows_at(column, sees, start, layout: tl.constexpr):
    """The logical rows of columns [64]: their own, or, from `start` on, those of a path's nodes."""
    if layout.paths:
        SPAN: tl.constexpr = layout.words * 64
        node = tl.arange(0, triton.next_power_of_2(SPAN))
        bits = bits_at(sees, node, layout)
        rank = tl.cumsum(bits, 0) - 1
        matches = (bits[:, None] != 0) & (rank[:, None] == (column - start)[None, :])
        return tl.where(column < start, column, start + tl.sum(tl.where(matches, node[:, None], 0), 0))
    else:
        return column


@triton.jit
def bits_at(sees, node, layout: tl.constexpr):
    """Selects those bits of a query's mask, 0 or 1, int32; rows that are not there count for nothing."""
    there = node < layout.width
    word = tl.load(sees + node // 64 * tl.num_programs(2) * layout.width, mask=there, other=0)
    return tl.where(there, (word >> node % 64) & 1, 0).to(tl.int32)


@triton.jit
def depth_of(sees, layout: tl.constexpr):
    """The length of the paths beyond their sequence's start, [n], of the masks that begin at sees [n]."""
    node = tl.arange(0, triton.next_power_of_2(layout.words * 64))[None, :]
    return tl.sum(bits_at(sees[:, None], node, layout), 1) - 1  # a query is among its own ancestors
