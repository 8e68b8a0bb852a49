"""What adapters add to a skinny product: what its programs do before they wait, and at their end.

In fast arithmetic rows of one adapter are groups (`grouped_updates`), else each row has factors of its own,
and was multiplied by the lower ones in a kernel before (`updates`). `plan`: the product's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eyas.engine.kernels.products.grouped_updates import (
    call_uppers,
    first_uppers,
    multiply_lowers,
    with_uppers,
)
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
def multiply_beside(updates, m, plan: tl.constexpr):
    """The work of a program in front of the tiles'."""
    CUT: tl.constexpr = plan.cut
    program = tl.program_id(1) * plan.beside + tl.program_id(0)
    if program < CUT.programs:
        multiply_lowers(updates, program, m, CUT, plan.pdl)


@triton.jit
def uppers_before(updates, row, m, column, lines, plan: tl.constexpr):
    """Before the wait: the first numbers of upper factors in these columns, which wait in registers; the
    others, in these `lines`, wait in L2. () where adapters add nothing.
    """
    CUT: tl.constexpr = plan.cut
    made = ()
    if CUT is not None:
        if plan.pdl and tl.program_id(1) == 0:
            call_uppers(updates, lines, CUT)
        made = first_uppers(updates, column, CUT, plan.pdl)
    elif plan.updated > 0:
        own = own_factors(updates, row, m, plan.k, plan.updated, plan.stride)
        made = (own, uppers_of(updates, own, 0, plan.early, column, plan.n))  # type: ignore[assignment]
        if plan.pdl and plan.early < GRAIN and tl.program_id(1) == 0:
            call_own(updates, own, lines, plan.n)
    return made


@triton.jit
def head_uppers_before(updates, row, m, first, apart, plan: tl.constexpr):
    """The same of half a tile's columns and the others, which are so far apart: of each, or, of groups of
    rows, of both together.
    """
    made = ((), ())
    if plan.cut is not None:
        lines = lines_of(plan.half)[:, None] + tl.arange(0, 2)[None, :] * apart
        lines = first + tl.reshape(lines, (2 * lines.shape[0],))
        made = (uppers_before(updates, row, m, _of_both(first, apart, plan), lines, plan), ())
    elif plan.updated > 0:
        low, lines = first + tl.arange(0, plan.half), first + lines_of(plan.half)
        of_low = uppers_before(updates, row, m, low, lines, plan)
        made = (of_low, uppers_before(updates, row, m, low + apart, lines + apart, plan))
    return made


@triton.jit
def _of_both(first, apart, plan: tl.constexpr):
    """Half a tile's columns and the others, which are so far apart; neighbours are loaded together."""
    pair = tl.arange(0, plan.columns)
    return first + pair // plan.half * apart + pair % plan.half


@triton.jit
def lines_of(COUNT: tl.constexpr):
    """The first of each line of upper factors in so many columns."""
    LINES: tl.constexpr = max(COUNT // FACTOR_LINE, 1)
    return tl.arange(0, LINES) * FACTOR_LINE


@triton.jit
def lowers_behind(updates, uppers, row, part, plan: tl.constexpr):
    """Behind the wait: the rows times the first ranks of the lower factors, which were multiplied before."""
    made = ()
    if plan.updated > 0 and plan.cut is None and not plan.mixed:
        made = lowers_of(updates, uppers[0], 0, row, part, plan.updated, plan.ranks)
    return made


@triton.jit
def updated(y, updates, uppers, lowers, row, m, column, part, plan: tl.constexpr):
    """A product plus what adapters add to it, before the rows' norm scales both."""
    CUT: tl.constexpr = plan.cut
    if CUT is not None:
        y = with_uppers(y, updates, uppers, m, column, part, CUT, plan.mixed)
    elif plan.mixed:
        y += updates_of(
            updates, row, m, column, part, plan.k, plan.n, plan.updated, plan.ranks, plan.stride
        )  # fmt: skip
    else:
        y += _by_ranks(updates, uppers, lowers, row, m, column, part, plan)
    return y


@triton.jit
def updated_head(y, updates, uppers, lowers, row, m, first, apart, part, plan: tl.constexpr):
    """The same of half a tile's columns and the others."""
    CUT: tl.constexpr = plan.cut
    if CUT is not None:
        column = _of_both(first, apart, plan)
        y = with_uppers(y, updates, uppers[0], m, column, part, CUT, False)
    else:
        column = first + tl.arange(0, plan.half)
        low = _by_ranks(updates, uppers[0], lowers, row, m, column, part, plan)
        high = _by_ranks(updates, uppers[1], lowers, row, m, column + apart, part, plan)
        y += _in_halves(low, high, plan)
    return y


@triton.jit
def _by_ranks(updates, uppers, lowers, row, m, column, part, plan: tl.constexpr):
    """What adapters add to columns of one part, rank by rank: float32 [rows, columns]."""
    sums = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    rank, upper = uppers[0]
    own = (tl.where(row < m, rank, 0), upper)
    sums = with_ranks(sums, updates, own, 0, lowers, uppers[1], column, plan.early, plan.late, plan.n)
    if plan.ranks > GRAIN:
        for first in range(GRAIN, tl.max(own[0]), GRAIN):
            more = lowers_of(updates, own, first, row, part, plan.updated, plan.ranks)
            sums = with_ranks(sums, updates, own, first, more, (), column, 0, plan.late, plan.n)
    return sums


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
