"""Terms that a few rows take from their ancestors before they read a state: all that follows from gates and
keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eyas.engine.kernels.states.mixing import convolved, key_rows, numbers_back
from eyas.engine.kernels.states.order import COLUMNS, STEP, ticks, weighed


@triton.jit
def mix_heads(
    head, inputs, stride, filters, bias, ring, tails, start, count, bound, before, mixed,
    layout: tl.constexpr,
):  # fmt: skip
    """Convolves a value head and its key head, which others that share it do as well, and keeps the inputs in
    the ring.
    """
    row = tl.arange(0, layout.width)
    real = row < count
    numbers = numbers_back(start + row, real, before, start, layout)
    given, made = (), ()
    for part in tl.static_range(3):  # all is read before anything is written, else each part would wait
        column, there = _columns(head, part, layout)
        at = inputs + row[:, None] * stride + column[None, :]
        given = given + (tl.load(at, mask=real[:, None] & there[None, :], other=0.0),)  # type: ignore[assignment]
        x = convolved(
            numbers, real, column, there, filters, bias, inputs, stride, start, start, ring, tails, bound,
            layout, True,
        )  # fmt: skip
        if part < 2:
            x = key_rows(x, layout)
        made = made + (x.to(mixed.dtype.element_ty),)  # type: ignore[assignment]
    at = mixed + row[:, None] * layout.inputs
    at_ring = ring + ((start + row) % layout.ring)[:, None] * layout.inputs
    for part in tl.static_range(3):
        column, there = _columns(head, part, layout)
        mask = real[:, None] & there[None, :]
        tl.store(at + column[None, :], made[part], mask=mask)
        if (part == 2) | (head % layout.group == 0):
            tl.store(at_ring + column[None, :], given[part], mask=mask)


@triton.jit
def _columns(head, part: tl.constexpr, layout: tl.constexpr):
    """The convolution's columns of a value head's queries, keys or values, and which of them there are."""
    if part == 2:
        dim = tl.arange(0, layout.values)
        first = 2 * layout.key_heads * layout.key_size + head * layout.value_size
        return first + dim, dim < layout.value_size
    else:
        dim = tl.arange(0, layout.key_size)
        return (part * layout.key_heads + head // layout.group) * layout.key_size + dim, dim >= 0


@triton.jit
def sums_along(
    start, bound, count, gates, ring_gates, before, positions, sums, sees, layout: tl.constexpr
):  # fmt: skip
    """Keeps the rows' gates, their sums of decays from the last position of a state on, and in `sees` which
    rows are on the path of each, a bit for each.
    """
    row = tl.arange(0, layout.width)
    real = row < count
    place = (start + row) % layout.ring
    at = row * (2 * layout.value_heads)
    decay = tl.load(gates + at, mask=real, other=0.0)
    beta = tl.load(gates + at + layout.value_heads, mask=real, other=0.0)
    target = ring_gates + place * (2 * layout.value_heads)
    tl.store(target, decay, mask=real)
    tl.store(target + layout.value_heads, beta, mask=real)
    column = tl.load(positions + row, mask=real, other=0) - bound
    latest = tl.load(sums + (start - 1) % layout.ring * layout.value_heads, mask=start > bound, other=0)
    parent = row - 1
    if layout.tree:
        parent = tl.load(before + row, mask=real, other=0) - start
    every = tl.full(row.shape, 0, tl.int64)
    path = tl.full(row.shape, 0, tl.int64)
    one = tl.full(row.shape, 1, tl.int64)
    for r in range(count):
        here = row == r
        mine = tl.sum(tl.where(here, parent, 0), 0)
        begins = tl.sum(tl.where(here, column, 0), 0) % COLUMNS == 0
        total = tl.where(mine < 0, latest, tl.sum(tl.where(row == mine, every, 0), 0))
        total = tl.where(begins, 0, total)
        every = tl.where(here, total + ticks(decay), every)
        above = tl.sum(tl.where(row == mine, path, 0), 0)
        path = tl.where(here, above | (one << r), path)
    tl.store(sums + place * layout.value_heads, every, mask=real)
    tl.store(sees + row, path, mask=real)


@triton.jit
def factors_of(head, spans, gates, mixed, positions, sees, factors, kept, layout: tl.constexpr):
    """Keeps the rows' keys, and writes their factors of `solved`, by certain columns and then by rows of this
    step, and behind them p by columns, as far as a row has them.
    """
    start, bound, count = spans
    keys, added, misses, solved, sums = kept
    WIDTH: tl.constexpr = layout.width
    row = tl.arange(0, layout.tile) % (layout.tile // 2)
    asks = tl.arange(0, layout.tile) >= layout.tile // 2
    real = row < count
    dim = tl.arange(0, layout.key_size)[None, :]
    key_head = head // layout.group
    at_head = (tl.where(asks, 0, layout.key_heads) + key_head) * layout.key_size + row * layout.inputs
    kq = tl.load(mixed + at_head[:, None] + dim, mask=real[:, None], other=0.0)
    at_key = ((start + row) % layout.ring * (layout.key_heads * layout.key_size))[:, None] + dim
    tl.store(keys + at_key, kq, mask=(real & (asks == 0))[:, None])
    beta = tl.load(gates + row * (2 * layout.value_heads) + layout.value_heads, mask=real, other=0.0)
    factor = tl.where(asks, layout.scale, -beta)
    own_sums = tl.load(sums + (start + row) % layout.ring * layout.value_heads, mask=real, other=0)
    column = tl.load(positions + row, mask=real, other=0) - bound
    written = real & (asks | layout.corrects)
    at = factors + row * (layout.value_heads * layout.factors)
    at_certain = at + tl.where(asks, COLUMNS + WIDTH, 0)
    for begin in range(0, start - bound, STEP):
        own = begin + tl.arange(0, STEP)
        known = bound + own < start
        place = (bound + own) % layout.ring
        at_place = (place * (layout.key_heads * layout.key_size))[:, None] + dim
        certain = tl.load(keys + at_place, mask=known[:, None], other=0.0)
        certain_sums = tl.load(sums + place * layout.value_heads, mask=known, other=0)
        near = known[None, :] & (real & (column < COLUMNS))[:, None]
        behind = weighed(kq, certain, factor, own_sums, certain_sums, near)
        tl.store(at_certain[:, None] + own[None, :], behind, mask=written[:, None])
    new = tl.arange(0, max(16, WIDTH))
    at_step = (new * layout.inputs + (layout.key_heads + key_head) * layout.key_size)[:, None] + dim
    step = tl.load(mixed + at_step, mask=(new < count)[:, None], other=0.0)
    new_place = (start + new) % layout.ring * layout.value_heads
    new_sums = tl.load(sums + new_place, mask=new < count, other=0)
    new_column = tl.load(positions + new, mask=new < count, other=0) - bound
    path = tl.load(sees + row, mask=real, other=0)
    near = ((path[:, None] >> new[None, :]) & 1) != 0
    near = near & (column[:, None] // COLUMNS == new_column[None, :] // COLUMNS)
    near = near & (asks[:, None] | (row[:, None] != new[None, :]))
    beside = weighed(kq, step, factor, own_sums, new_sums, near)
    at += COLUMNS + tl.where(asks, WIDTH, 0)
    there = tl.where(asks[:, None], near, (new < WIDTH)[None, :])
    to = tl.where(asks[:, None], (new_column % COLUMNS)[None, :], new[None, :])
    tl.store(at[:, None] + to, beside, mask=there & written[:, None])


@triton.jit
def solve_rows(spans, positions, factors, solved, layout: tl.constexpr):
    """Keeps the rows' `solved`, by the factors that `factors_of` wrote."""
    start, bound, count = spans
    row = tl.arange(0, layout.width)
    real = row < count
    own = tl.arange(0, COLUMNS)
    column = tl.load(positions + row, mask=real, other=0) - bound
    made = tl.where(column[:, None] % COLUMNS == own[None, :], 1.0, 0.0)
    at = factors + row * (layout.value_heads * layout.factors)
    for begin in range(0, start - bound, STEP):
        for c in tl.static_range(STEP):
            known = begin + c < start - bound
            factor = tl.load(at + begin + c, mask=real & known, other=0.0)
            place = (bound + begin + c) % layout.ring * (layout.value_heads * COLUMNS)
            whole = tl.load(solved + place + own, mask=known & (own < begin + STEP), other=0.0)
            made = _grown_by(made, factor, whole)
    for c in range(count - 1):
        whole = tl.sum(tl.where((row == c)[:, None], made, 0.0), 0)
        made = _grown_by(made, tl.load(at + COLUMNS + c, mask=real, other=0.0), whole)
    at = ((start + row) % layout.ring * (layout.value_heads * COLUMNS))[:, None] + own[None, :]
    tl.store(solved + at, made, mask=real[:, None])


@triton.jit
def _grown_by(made, factor, whole):
    """made [m, 64] with a column more, whose row is `whole` [64], times `factor` [m]."""
    factor = tl.broadcast_to(factor[:, None], made.shape)
    return tl.fma(factor, tl.broadcast_to(whole[None, :], made.shape), made)
