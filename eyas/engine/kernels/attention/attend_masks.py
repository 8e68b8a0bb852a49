"""Masks of a sequence's few query rows: the keys that each sees, in a chain, or in a tree by its mask."""

from __future__ import annotations

import triton
import triton.language as tl

from eyas.engine.kernels.attention.softmax import UNSEEN


@triton.jit
def lowest_of(sees, start, low, edge, layout: tl.constexpr):
    """The first row that each query sees, where not all see those from `low` on.

    sees [tile, 1] is a query's own row after `start`, or its mask, or the address of the first of its mask's
    words; of a chain, rows before `edge` are seen by themselves alone.
    """
    lowest = tl.minimum(edge, start + sees) if layout.words == 0 else low
    if layout.window > 0:
        lowest = tl.maximum(lowest, start + _depth(sees, layout) - layout.window + 1)
    if layout.chunk > 0:  # no tree's
        lowest = tl.maximum(lowest, (start + sees) // layout.chunk * layout.chunk)
    return lowest


@triton.jit
def masked(scores, row, inside, sees, lowest, start, block, layout: tl.constexpr):
    """scores [tile, keys] of the rows from `block` on, UNSEEN where a query sees not."""
    if layout.narrow:
        seen = _seen(row[None, :] - start, sees, layout) & inside[None, :]
        scores = tl.where(seen & (row[None, :] >= lowest), scores, UNSEEN)
    elif block + layout.keys > start:
        seen = _seen(row[None, :] - start, sees, layout) & inside[None, :]
        scores = tl.where(seen, scores, UNSEEN)
    return scores


@triton.jit
def _seen(after, sees, layout: tl.constexpr):
    """True if a query sees the rows that stand `after` [1, keys] rows after its sequence's start."""
    if layout.words > 0:
        row = tl.minimum(tl.maximum(after, 0), layout.words * 64 - 1)
        return (after < 0) | (_bits(sees, row, layout) != 0)
    else:
        return after <= sees


@triton.jit
def _bits(sees, row, layout: tl.constexpr):
    """Selects those bits of each query's mask: row [1, n] -> [tile, n], each 0 or 1."""
    if layout.words == 1:
        return (sees >> row) & 1
    else:
        word = tl.load(sees + row // 64 * tl.num_programs(2) * layout.width)
        return (word >> row % 64) & 1


@triton.jit
def _depth(sees, layout: tl.constexpr):
    """The length of each query's path beyond its sequence's start, [tile, 1]."""
    if layout.words > 0:
        depth = tl.full([layout.tile], -1, tl.int64)  # it is among its own ancestors
        for word in tl.static_range(layout.words):
            row = word * 64 + tl.arange(0, 64)[None, :]
            depth += tl.sum(tl.where(row < layout.extent, _bits(sees, row, layout), 0), 1)
        return depth.to(tl.int32)[:, None]
    else:
        return sees
