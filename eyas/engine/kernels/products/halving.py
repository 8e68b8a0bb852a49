"""Sums whose order is fixed: neighbours are added, then neighbouring pairs, and so on.

`tl.sum` adds in an order that follows the layout of its input, and so warps, shapes and the compiler's
version. A sum of two numbers has one result; this file makes every sum of those. Zeros that pad its input on
the right change nothing, so that the order is one whatever the padding.
"""

from __future__ import annotations

import triton
import triton.language as tl

SUM_GROUP = 64
"""Columns of a row whose squares are added up into one number, at most; the reader adds those up."""


@triton.jit
def halving_sum(values):
    """values [rows, n], n a power of 2 -> [rows]."""
    ROWS: tl.constexpr = values.shape[0]
    LEVELS: tl.constexpr = _levels(values.shape[1])
    for level in tl.static_range(LEVELS):
        values = tl.sum(tl.reshape(values, (ROWS, 1 << (LEVELS - 1 - level), 2)), 2)
    return tl.reshape(values, (ROWS,))


@triton.jit
def halving_total(values, COUNT: tl.constexpr):
    """The sum of COUNT columns, a power of 2, a tensor each, in the order of `halving_sum`: no number changes
    threads.
    """
    LEVELS: tl.constexpr = _levels(COUNT)
    for level in tl.static_range(LEVELS):
        pairs = ()
        for i in tl.static_range(COUNT >> (level + 1)):
            pairs = pairs + (values[2 * i] + values[2 * i + 1],)  # type: ignore[assignment]
        values = pairs
    return values[0]


@triton.constexpr_function
def _levels(n):
    return n.bit_length() - 1
