"""The gated delta rule for a few rows of each sequence: decoded ones, chains and trees of drafts.

Two kernels. The first makes what a row needs of its ancestors: convolution, sums of gates, `solved` and
`weights` (see `order`). The second reads the state, once for all rows of a sequence: it folds what is due,
and where drafts pass the next position of a state, it makes the state behind their path, which is never
stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import power_of_2
from eyas.engine.kernels.states.mixing import convolved, normed, numbers_back
from eyas.engine.kernels.states.order import (
    COLUMNS,
    STEP,
    DeltaLayer,
    DeltaLayout,
    apart,
    corrections,
    folded,
    joined,
    missed,
    product_onto,
    read,
    readings,
    rows_times_onto,
    shares_of,
    solve_behind,
    solve_further,
    ticks,
)
from eyas.engine.states.rows import StateRows
from eyas.engine.states.shape import SPAN

MOST_ROWS = 64
"""Rows of a sequence in a step, at most: a word has a bit for each."""

_BLOCK, _WIDE_BLOCK = 32, 128  # columns of a value head to a program
_MANY = 256  # value heads of all sequences, from which on programs are wide


def recur_few(
    inputs: torch.Tensor,
    gates: torch.Tensor,
    layer: DeltaLayer,
    rows: StateRows,
    tree: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """What rows read of their states, [m, value heads * value size], of the inputs' dtype; zeros in rows that
    no sequence has.

    inputs [m, shape.inputs] before the convolution, rows of any stride; gates float32 [m, shape.gates]. The
    rows are kept in the ring, and a state whose fold is due is folded. `tree`: rows have the ancestors that
    `rows` says, else the rows before them.
    """
    shape, (m, _) = layer.rule.shape, inputs.shape
    stored, solved = layer.stored, layer.solved
    if rows.most > MOST_ROWS:
        raise ValueError(f"{rows.most} rows of a sequence are more than {MOST_ROWS}")
    width = power_of_2(rows.most)
    first = DeltaLayout.of(layer, width, _BLOCK, tree, pdl)
    out = inputs.new_zeros(m, shape.value_heads * shape.value_size)
    mixed = inputs.new_empty(m, shape.inputs)
    weights = gates.new_empty(m, shape.value_heads, SPAN)
    sees = torch.empty(m, dtype=torch.int64, device=inputs.device)
    where = (rows.slots, rows.firsts, rows.counts, rows.starts, rows.bounds, rows.folds)
    kept = (solved.keys, solved.misses, solved.solved, solved.sums)
    options = {"enable_fp_fusion": False, "launch_pdl": pdl}
    _prepare[(shape.value_heads, rows.slots.shape[0])](
        *(inputs, inputs.stride(0), gates, layer.rule.filters, stored.inputs, stored.gates, stored.tails),
        *(solved.keys, solved.solved, solved.sums),
        *(*where, rows.before, rows.positions, mixed, weights, sees, first),
        num_warps=first.tile // 4 if first.tile < 64 else 8,
        **options,
    )
    many = shape.value_heads * rows.slots.shape[0] >= _MANY
    layout = DeltaLayout.of(layer, 2 * max(8, width), _WIDE_BLOCK if many else _BLOCK, tree, pdl)
    _read[(shape.value_heads * layout.blocks, rows.slots.shape[0])](
        *(mixed, gates, weights, sees, stored.states, stored.inputs, stored.tails),
        *(*kept, *where, rows.positions, out, layout, rows.most > 1),
        num_warps=8 if tree or layout.rows > 32 else 4,
        **options,
    )
    return out


@kernel
def _prepare(
    inputs, stride, gates, filters, ring, ring_gates, tails, keys, solved, sums,
    slots, firsts, counts, starts, bounds, folds, before, positions, mixed, weights, sees,
    layout: tl.constexpr,
):  # fmt: skip
    """Grid (value heads, B)."""
    after_previous(layout.pdl)
    head, sequence = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + sequence)
    if count == 0:
        return
    slot, first = tl.load(slots + sequence).to(tl.int64), tl.load(firsts + sequence).to(tl.int64)
    start, bound = tl.load(starts + sequence), tl.load(folds + sequence)
    mixed, before = mixed + first * layout.inputs, before + first
    _mix_heads(
        head, inputs + first * stride, stride, filters, ring + slot * layout.input_stride,
        tails + slot * layout.tail_stride, start, count, tl.load(bounds + sequence), before, mixed, layout,
    )  # fmt: skip
    heads = slot * layout.ring * layout.value_heads + head
    sums, solved = sums + heads, solved + heads * COLUMNS
    keys += (slot * layout.ring * layout.key_heads + head // layout.group) * layout.key_size
    weights += (first * layout.value_heads + head) * COLUMNS
    row = tl.arange(0, layout.tile)
    real = row < count
    number = start + row
    dim = tl.arange(0, layout.key_size)[None, :]
    at_head = mixed + row[:, None] * layout.inputs
    at_head += head // layout.group * layout.key_size + dim
    tl.debug_barrier()  # heads are read by other threads than wrote them
    q = tl.load(at_head, mask=real[:, None], other=0.0)
    k = tl.load(at_head + layout.key_heads * layout.key_size, mask=real[:, None], other=0.0)
    decay, beta = _keep_gates(
        gates + first * (2 * layout.value_heads) + row * (2 * layout.value_heads) + head,
        ring_gates + slot * layout.gate_stride + number % layout.ring * (2 * layout.value_heads) + head,
        real, layout,
    )  # fmt: skip
    column = tl.load(positions + first + row, mask=real, other=0) - bound
    latest = tl.load(sums + (start - 1) % layout.ring * layout.value_heads, mask=start > bound, other=0)
    parent = row - 1
    if layout.tree:
        parent = tl.load(before + row, mask=real, other=0) - start
    own_sums, path = _along_paths(row, column, decay, parent, latest, count, layout)
    made, used = _behind_certain(k, q, beta, own_sums, column, start, bound, keys, solved, sums, layout)
    seen = ((path[:, None] >> row[None, :]) & 1) != 0
    seen = seen & (column[:, None] // COLUMNS == column[None, :] // COLUMNS) & real[:, None]
    nearest = corrections(k, k, beta, own_sums, own_sums, seen & (row[:, None] != row[None, :]))
    made, used = solve_further(
        made, used, nearest, readings(q, k, layout.scale, own_sums, own_sums, seen), count
    )
    own = tl.arange(0, COLUMNS)[None, :]
    place = number % layout.ring
    tl.store(sums + place * layout.value_heads, own_sums, mask=real)
    tl.store(solved + place[:, None] * (layout.value_heads * COLUMNS) + own, made, mask=real[:, None])
    tl.store(weights + row[:, None] * (layout.value_heads * COLUMNS) + own, used, mask=real[:, None])
    if head % layout.group == 0:
        at_key = place[:, None] * (layout.key_heads * layout.key_size) + dim
        tl.store(keys + at_key, k, mask=real[:, None])
    if head == 0:
        tl.store(sees + first + row, path, mask=real)


@triton.jit
def _behind_certain(
    k, q, beta, own_sums, column, start, bound, keys, solved, sums, layout: tl.constexpr
):  # fmt: skip
    """`solved` and `weights` of rows as far as the sequence's certain rows make them. `keys`, `solved` and
    `sums` point at the slot's first place, of the head.
    """
    dim = tl.arange(0, layout.key_size)[None, :]
    own = tl.arange(0, COLUMNS)[None, :]
    made = tl.where(column[:, None] % COLUMNS == own, 1.0, 0.0)
    used = tl.full(made.shape, 0.0, tl.float32)
    for begin in range(0, start - bound, STEP):
        certain = begin + tl.arange(0, STEP)
        known = certain < start - bound
        near = known[None, :] & (column < COLUMNS)[:, None]
        place = (bound + certain) % layout.ring
        at = place[:, None] * (layout.key_heads * layout.key_size) + dim
        certain_keys = tl.load(keys + at, mask=known[:, None], other=0.0)
        certain_sums = tl.load(sums + place * layout.value_heads, mask=known, other=0)
        at_solved = place[:, None] * (layout.value_heads * COLUMNS) + own
        lower = known[:, None] & (own < begin + STEP)
        certain_solved = tl.load(solved + at_solved, mask=lower, other=0.0)
        made, used = solve_behind(
            made, used, k, q, beta, own_sums, certain_keys, certain_sums, certain_solved, near, layout.scale
        )
    return made, used


@triton.jit
def _mix_heads(
    head, inputs, stride, filters, ring, tails, start, count, bound, before, mixed,
    layout: tl.constexpr,
):  # fmt: skip
    """Convolves a value head and its key head, which others that share it do as well, and keeps the inputs in
    the ring.
    """
    row = tl.arange(0, layout.rows)
    real = row < count
    number = start + row
    dim = tl.arange(0, layout.key_size)
    q = head // layout.group * layout.key_size + dim
    k = q + layout.key_heads * layout.key_size
    v = 2 * layout.key_heads * layout.key_size + head * layout.value_size
    v = v + tl.arange(0, layout.value_size)
    numbers = numbers_back(number, real, before, start, layout)
    lowest = start - 1
    q_rows = convolved(
        numbers, real, q, lowest, filters, inputs, stride, start, start, ring, tails, bound, layout
    )
    k_rows = convolved(
        numbers, real, k, lowest, filters, inputs, stride, start, start, ring, tails, bound, layout
    )
    v_rows = convolved(
        numbers, real, v, lowest, filters, inputs, stride, start, start, ring, tails, bound, layout
    )
    at = mixed + row[:, None] * layout.inputs
    tl.store(at + q[None, :], normed(q_rows).to(mixed.dtype.element_ty), mask=real[:, None])
    tl.store(at + k[None, :], normed(k_rows).to(mixed.dtype.element_ty), mask=real[:, None])
    tl.store(at + v[None, :], v_rows.to(mixed.dtype.element_ty), mask=real[:, None])
    _keep(number, real, v, inputs, stride, start, ring, layout)
    if head % layout.group == 0:
        _keep(number, real, q, inputs, stride, start, ring, layout)
        _keep(number, real, k, inputs, stride, start, ring, layout)


@triton.jit
def _keep_gates(source, target, real, layout: tl.constexpr):
    """Copies rows' gates to the ring -> their log decays and betas."""
    decay = tl.load(source, mask=real, other=0.0)
    beta = tl.load(source + layout.value_heads, mask=real, other=0.0)
    tl.store(target, decay, mask=real)
    tl.store(target + layout.value_heads, beta, mask=real)
    return decay, beta


@triton.jit
def _keep(number, real, column, inputs, stride, start, ring, layout: tl.constexpr):
    """Copies columns [n] of the forward's rows to the ring."""
    at = (number - start)[:, None] * stride + column[None, :]
    x = tl.load(inputs + at, mask=real[:, None], other=0.0)
    at = (number % layout.ring)[:, None] * layout.inputs + column[None, :]
    tl.store(ring + at, x, mask=real[:, None])


@triton.jit
def _along_paths(row, column, decay, parent, latest, count, layout: tl.constexpr):
    """Each row's sum of decays from the last position of a state on; and which rows are on its path,
    a bit for each. `latest`: the sum of the last certain row.
    """
    sums = tl.full(row.shape, 0, tl.int64)
    path = tl.full(row.shape, 0, tl.int64)
    one = tl.full(row.shape, 1, tl.int64)
    for r in range(count):
        here = row == r
        mine = tl.sum(tl.where(here, parent, 0), 0)
        begins = tl.sum(tl.where(here, column, 0), 0) % COLUMNS == 0
        total = tl.where(mine < 0, latest, tl.sum(tl.where(row == mine, sums, 0), 0))
        total = tl.where(begins, 0, total)
        sums = tl.where(here, total + ticks(decay), sums)
        above = tl.sum(tl.where(row == mine, path, 0), 0)
        path = tl.where(here, above | (one << r), path)
    return sums, path


@kernel
def _read(
    mixed, gates, weights, sees, states, ring, tails, keys, misses, solved, sums,
    slots, firsts, counts, starts, bounds, folds, positions, out, layout: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    """Grid (value heads * blocks, B). SEVERAL: a sequence may have more than one row."""
    after_previous(layout.pdl)
    sequence = tl.program_id(1)
    head, block = tl.program_id(0) // layout.blocks, tl.program_id(0) % layout.blocks
    count = tl.load(counts + sequence)
    if count == 0:
        return
    slot, first = tl.load(slots + sequence).to(tl.int64), tl.load(firsts + sequence).to(tl.int64)
    start, bound, stood = tl.load(starts + sequence), tl.load(folds + sequence), tl.load(bounds + sequence)
    heads = slot * layout.ring * layout.value_heads + head
    sums, solved, misses = sums + heads, solved + heads * COLUMNS, misses + heads * layout.value_size
    keys += (slot * layout.ring * layout.key_heads + head // layout.group) * layout.key_size
    mixed, gates = mixed + first * layout.inputs, gates + first * (2 * layout.value_heads)
    heads = first * layout.value_heads + head
    weights, out = weights + heads * COLUMNS, out + heads * layout.value_size
    sees, positions = sees + first, positions + first
    dim = tl.arange(0, layout.slice)[:, None]
    v_column = block * layout.block + tl.arange(0, layout.block)
    at_state = states + slot * layout.state_stride + head * (layout.key_size * layout.value_size)
    at_state += dim * layout.value_size + v_column[None, :]
    real_state = (dim >= 0) & (bound > 0)
    keys_at = keys + tl.arange(0, layout.slice)[None, :]
    if stood != bound:
        _fold_due(at_state, real_state, stood, v_column, keys_at, misses, solved, sums, mixed, layout)
        _keep_tail(slot, bound, head, block, v_column, ring, tails, layout)
        tl.debug_barrier()  # the state is read again, by other threads
    row = tl.arange(0, layout.rows) % (layout.rows // 2)
    column = tl.load(positions + row, mask=row < count, other=0) - bound
    path = tl.full(row.shape, 0, tl.int64)
    if layout.tree:
        path = tl.load(sees + row, mask=row < count, other=0)
    picked = (row < count) & (column < COLUMNS)
    known = _known(at_state, real_state, row, head, picked, keys_at, 0, 0, 0, mixed, layout, False)
    _read_from(
        known, 0, picked, row, column, head, v_column, start, bound, count,
        mixed, gates, weights, sees, misses, sums, out, layout,
    )  # fmt: skip
    if SEVERAL:
        if tl.max(tl.where(row < count, column, 0), 0) >= COLUMNS:
            tl.debug_barrier()
            for node in range(count):
                if tl.load(positions + node) - bound == COLUMNS - 1:
                    number, _ = _numbers(0, node, column, row, start, bound, count, sees, layout)
                    at = number % layout.ring
                    shares, total = _shares_along(at, v_column, misses, solved, sums, mixed, layout)
                    picked = (row < count) & (column >= COLUMNS)
                    if layout.tree:
                        picked = picked & (((path >> node) & 1) != 0)
                    known = _known(
                        at_state, real_state, row, head, picked, keys_at, at, shares, total,
                        mixed, layout, True,
                    )  # fmt: skip
                    _read_from(
                        known, 1, picked, row, column, head, v_column, start, bound, count,
                        mixed, gates, weights, sees, misses, sums, out, layout,
                    )  # fmt: skip


@triton.jit
def _fold_due(
    at_state, real_state, stood, v_column, keys, misses, solved, sums, mixed, layout: tl.constexpr
):  # fmt: skip
    """Folds the rows behind a stored state, which stands at `stood`, into it."""
    place = (stood + tl.arange(0, COLUMNS)) % layout.ring
    shares, total = _shares_along(place, v_column, misses, solved, sums, mixed, layout)
    for begin in range(0, layout.key_size, layout.slice):
        some = tl.load(at_state + begin * layout.value_size, mask=real_state & (stood > 0), other=0.0)
        at_keys = keys + begin + place[:, None] * (layout.key_heads * layout.key_size)
        some = folded(some, tl.load(at_keys), shares, total, mixed.dtype.element_ty)
        tl.store(at_state + begin * layout.value_size, some)


@triton.jit
def _known(
    at_state, real_state, row, head, picked, keys, place, shares, total, mixed,
    layout: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """What a state has for keys and queries, [rows, n]: the stored one, or, if FOLD, that behind 64 rows, in
    the places `place`, which is never stored.
    """
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    key_column = tl.where(tl.arange(0, layout.rows) >= layout.rows // 2, 0, layout.key_heads)
    key_column = (key_column + head // layout.group) * layout.key_size
    at_kq = (mixed + row[:, None] * layout.inputs + key_column[:, None]) + tl.arange(0, layout.slice)[None, :]
    high = tl.full((layout.rows, layout.block), 0.0, tl.float32)
    low = high
    for begin in range(0, layout.key_size, layout.slice):
        some = tl.load(at_state + begin * layout.value_size, mask=real_state, other=0.0)
        kq = tl.load(at_kq + begin, mask=picked[:, None], other=0.0)
        if FOLD:
            at_keys = keys + begin + place[:, None] * (layout.key_heads * layout.key_size)
            some = folded(some, tl.load(at_keys), shares, total, DTYPE)
        high, low = rows_times_onto(kq, some, high, low, DTYPE)
    return apart(high, low)


@triton.jit
def _read_from(
    known, span, picked, row, column, head, v_column, start, bound, count,
    mixed, gates, weights, sees, misses, sums, out, layout: tl.constexpr,
):  # fmt: skip
    """The rows `picked` read a state that stands `span` spans behind `bound`, and has `known` for them. In a
    tile, rows stand as keys, then as queries.
    """
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    asks = tl.arange(0, layout.rows) >= layout.rows // 2
    own = tl.arange(0, COLUMNS)[None, :]
    known_rows, _ = _numbers(span, 0, column, row, start, bound, count, sees, layout)
    certain = (known_rows < start) & (span == 0)
    at = (known_rows % layout.ring)[:, None] * (layout.value_heads * layout.value_size)
    certain_misses = tl.load(misses + at + v_column[None, :], mask=certain[:, None], other=0.0)
    told, asked = picked & (asks == 0), picked & asks
    value_column = 2 * layout.key_heads * layout.key_size + head * layout.value_size + v_column
    at = row[:, None] * layout.inputs + value_column[None, :]
    values = tl.load(mixed + at, mask=told[:, None], other=0.0)
    at_gate = gates + row * (2 * layout.value_heads) + layout.value_heads + head
    beta = tl.load(at_gate, mask=told, other=0.0)
    ring_row = (start + row) % layout.ring * layout.value_heads
    own_sums = tl.load(sums + ring_row, mask=picked, other=0)
    w = tl.load(weights + row[:, None] * (layout.value_heads * COLUMNS) + own, mask=asked[:, None], other=0.0)
    at_miss = misses + ring_row[:, None] * layout.value_size + v_column[None, :]
    tl.store(at_miss, missed(values, beta, own_sums, known), mask=told[:, None])
    tl.debug_barrier()  # rows' misses are read by other threads than wrote them
    high = tl.full((layout.rows, layout.block), 0.0, tl.float32)
    left, right = high, high
    if layout.tree:
        for node in range(count):
            here = asked & (row == node)
            if tl.max(here.to(tl.int32), 0) > 0:
                every = _misses_along(
                    span, node, certain, certain_misses, v_column, column, row,
                    start, bound, count, misses, sees, layout,
                )  # fmt: skip
                mine = tl.where(here[:, None], w, 0.0)
                high, left, right = product_onto(mine, every, high, left, right, DTYPE)
    else:
        every = _misses_along(
            span, 0, certain, certain_misses, v_column, column, row, start, bound, count,
            misses, sees, layout,
        )  # fmt: skip
        high, left, right = product_onto(w, every, high, left, right, DTYPE)
    made = read(known, layout.scale, own_sums, joined(high, left, right))
    at_out = out + row[:, None] * (layout.value_heads * layout.value_size) + v_column[None, :]
    tl.store(at_out, made.to(out.dtype.element_ty), mask=asked[:, None])


@triton.jit
def _misses_along(
    span, node, certain, certain_misses, v_column, column, row, start, bound, count,
    misses, sees, layout: tl.constexpr,
):  # fmt: skip
    """The misses [64, n] of the rows on a path, by columns."""
    number, there = _numbers(span, node, column, row, start, bound, count, sees, layout)
    at = (number % layout.ring)[:, None] * (layout.value_heads * layout.value_size)
    new = there & (certain == 0)
    new_misses = tl.load(misses + at + v_column[None, :], mask=new[:, None], other=0.0)
    return tl.where(certain[:, None], certain_misses, new_misses)


@triton.jit
def _numbers(span, node, column, row, start, bound, count, sees, layout: tl.constexpr):
    """The numbers of the rows in the columns of a span along the path of a node, and whether there is one."""
    at = span * COLUMNS + tl.arange(0, COLUMNS)
    if layout.tree:
        path = tl.load(sees + node)
        on = (row < count) & (tl.arange(0, layout.rows) < layout.rows // 2) & (((path >> row) & 1) != 0)
        matches = on[None, :] & (column[None, :] == at[:, None])
        found = tl.sum(tl.where(matches, row[None, :], 0), 1)
        there = tl.sum(matches.to(tl.int32), 1) > 0
        certain = bound + at < start
        return tl.where(certain, bound + at, start + found), certain | there
    else:
        return bound + at, bound + at < start + count


@triton.jit
def _shares_along(place, v_column, misses, solved, sums, mixed, layout: tl.constexpr):
    """`shares_of` the rows in places `place` [64] of the ring, and the last one's sum of decays."""
    heads_row = place * layout.value_heads
    own = tl.arange(0, COLUMNS)
    every_sum = tl.load(sums + heads_row)
    total = tl.sum(tl.where(own == COLUMNS - 1, every_sum, 0), 0)
    lower = own[None, :] // STEP <= own[:, None] // STEP
    factors = tl.load(solved + heads_row[:, None] * COLUMNS + own[None, :], mask=lower, other=0.0)
    every = tl.load(misses + heads_row[:, None] * layout.value_size + v_column[None, :])
    return shares_of(factors, every, every_sum, total, mixed.dtype.element_ty), total


@triton.jit
def _keep_tail(slot, bound, head, block, v_column, ring, tails, layout: tl.constexpr):
    """The tail of the state at `bound`, of the columns that a program answers for."""
    tap = tl.arange(0, triton.next_power_of_2(layout.kernel))
    real = tap < layout.kernel - 1
    number = bound - layout.kernel + 1 + tap
    source = ring + slot * layout.input_stride + (number % layout.ring)[:, None] * layout.inputs
    target = tails + slot * layout.tail_stride + tap[:, None] * layout.inputs
    key_columns = layout.key_heads * layout.key_size
    v = (2 * key_columns + head * layout.value_size + v_column)[None, :]
    tl.store(target + v, tl.load(source + v, mask=real[:, None]), mask=real[:, None])
    if (block == 0) & (head % layout.group == 0):
        q = head // layout.group * layout.key_size + tl.arange(0, layout.key_size)[None, :]
        tl.store(target + q, tl.load(source + q, mask=real[:, None]), mask=real[:, None])
        k = q + key_columns
        tl.store(target + k, tl.load(source + k, mask=real[:, None]), mask=real[:, None])
