"""What adapters add to a skinny product: what its programs do before they wait, and at their end.

In fast arithmetic of more than four rows a kernel beside the product makes it (`grouped_updates`), and the
product adds numbers. Else each row has factors of its own, and is multiplied by the lower ones in a kernel
before (`updates`), or beside (`few_updates`): the product multiplies by the upper ones. `plan`: the
product's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eyas.engine.kernels.products.few_updates import lowers_beside
from eyas.engine.kernels.products.grouped_updates import adapted_rows, added_is_there, with_added
from eyas.engine.kernels.products.updates import (
    FACTOR_LINE,
    GRAIN,
    call_own,
    lowers_of,
    own_factors,
    updates_of,
    uppers_of,
    with_ranks,
)


@triton.jit
def uppers_before(updates, row, m, column, lines, plan: tl.constexpr):
    """Before the wait: the first numbers of upper factors in these columns, which wait in registers; the
    others, in these `lines`, wait in L2. () where adapters add nothing.
    """
    made = ()
    if plan.updated > 0:
        own = own_factors(updates, row, m, plan.k, plan.updated, plan.stride)
        made = (own, uppers_of(updates, own, 0, plan.early, column, plan.n))  # type: ignore[assignment]
        if plan.pdl and plan.early < GRAIN and tl.program_id(1) == 0:
            call_own(updates, own, lines, plan.n)
    return made


@triton.jit
def head_uppers_before(updates, row, m, first, apart, plan: tl.constexpr):
    """The same of half a tile's columns, and of the others, which are so far apart."""
    made = ((), ())
    if plan.updated > 0:
        low, lines = first + tl.arange(0, plan.half), first + lines_of(plan.half)
        of_low = uppers_before(updates, row, m, low, lines, plan)
        made = (of_low, uppers_before(updates, row, m, low + apart, lines + apart, plan))
    return made


@triton.jit
def lines_of(COUNT: tl.constexpr):
    """The first of each line of upper factors in so many columns."""
    LINES: tl.constexpr = max(COUNT // FACTOR_LINE, 1)
    return tl.arange(0, LINES) * FACTOR_LINE


@triton.jit
def lowers_behind(updates, uppers, row, part, plan: tl.constexpr):
    """Behind the wait: the rows times the first ranks of the lower factors, which were multiplied before. ()
    where that is made beside the product: it is waited for at the end.
    """
    made = ()
    if plan.updated > 0 and not plan.mixed and not plan.first:
        made = lowers_of(updates, uppers[0], 0, row, part, plan.updated, plan.ranks)
    return made


@triton.jit
def updated(y, updates, uppers, lowers, row, m, column, part, plan: tl.constexpr):
    """A product plus what adapters add to it, before the rows' norm scales both."""
    if plan.mixed:
        y += updates_of(
            updates, row, m, column, part, plan.k, plan.n, plan.updated, plan.ranks, plan.stride
        )  # fmt: skip
    else:
        y += _by_ranks(updates, uppers, lowers, row, m, column, part, plan)
    return y


@triton.jit
def updated_head(y, updates, uppers, lowers, row, m, first, apart, part, plan: tl.constexpr):
    """The same of half a tile's columns and the others."""
    column = first + tl.arange(0, plan.half)
    low = _by_ranks(updates, uppers[0], lowers, row, m, column, part, plan)
    high = _by_ranks(updates, uppers[1], lowers, row, m, column + apart, part, plan)
    return y + _in_halves(low, high, plan)


@triton.jit
def _by_ranks(updates, uppers, lowers, row, m, column, part, plan: tl.constexpr):
    """What adapters add to columns of one part, rank by rank: float32 [rows, columns]."""
    sums = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    rank, upper = uppers[0]
    own = (tl.where(row < m, rank, 0), upper)
    if plan.first:
        lowers = _lowers(updates, own, 0, row, m, part, plan)
    sums = with_ranks(sums, updates, own, 0, lowers, uppers[1], column, plan.early, plan.late, plan.n)
    if plan.ranks > GRAIN:
        for first in range(GRAIN, tl.max(own[0]), GRAIN):
            more = _lowers(updates, own, first, row, m, part, plan)
            sums = with_ranks(sums, updates, own, first, more, (), column, 0, plan.late, plan.n)
    return sums


@triton.jit
def _lowers(updates, own, first, row, m, part, plan: tl.constexpr):
    """The rows times GRAIN ranks of a part's lower factors: [rows, GRAIN]."""
    if plan.first:
        lowers = lowers_beside(
            updates, own, first, row, m, part, plan.k, plan.updated, plan.ranks, plan.stride, plan.piece
        )  # fmt: skip
    else:
        lowers = lowers_of(updates, own, first, row, part, plan.updated, plan.ranks)
    return lowers


@triton.jit
def _in_halves(low, high, plan: tl.constexpr):
    """A tile [rows, columns] of its first half of columns, and the other."""
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (plan.rows, plan.columns))


@triton.jit
def part_at(updates, column, plan: tl.constexpr):
    """The part of a column, which a tile's others may have too, or of each of some columns."""
    part = 0
    if plan.updated > 1:
        part = tl.load(updates[4] + column)
    return part


# --- of a product beside which it is made -----------------------------------------------------------------


@triton.jit
def adapted_before(updates, row, m, plan: tl.constexpr):
    """The rows that something is added to; read before the wait."""
    made = ()
    if plan.added:
        made = adapted_rows(updates, row, m)
    return made


@triton.jit
def wait_for_added(plan: tl.constexpr):
    """Behind the sums over k, before anything is written."""
    if plan.added:
        added_is_there(plan.pdl)


@triton.jit
def with_added_beside(y, updates, adapted, row, m, column, plan: tl.constexpr):
    """A product plus what is added, before the rows' norm scales both."""
    if plan.added:
        y = with_added(y, updates, adapted, row, m, column, plan.n)
    return y
