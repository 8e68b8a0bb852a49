"""Layers with a state over a few rows of each sequence: decoded ones, chains and trees of drafts.

One kernel, a program for each value head of a sequence. It makes what its rows need of their ancestors
(convolution, sums of gates, `solved`: see `order`), then reads the state, once for all rows. It folds what is
due, and where drafts pass the next position of a state, it makes the state behind their path, which is never
stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.launching import after_previous, call_ahead, kernel
from eyas.engine.kernels.launch.sizes import power_of_2
from eyas.engine.kernels.states.few_rows import factors_of, mix_heads, solve_rows, sums_along
from eyas.engine.kernels.states.order import (
    COLUMNS,
    STEP,
    DeltaLayer,
    DeltaLayout,
    apart,
    folded,
    missed,
    read,
    rows_times_onto,
)
from eyas.engine.states.rows import StateRows

MOST_ROWS = 64
"""Rows of a sequence in a step, at most: a word has a bit for each."""


def recur_few(
    inputs: torch.Tensor,
    gates: torch.Tensor,
    layer: DeltaLayer,
    rows: StateRows,
    out: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Writes what rows read of their states to `out` [m, value heads * value size], of the inputs' dtype;
    other rows stay as they are.

    inputs [m, shape.inputs] before the convolution, rows of any stride; gates float32 [m, shape.gates]. The
    rows are kept in the ring, and a state whose fold is due is folded.
    """
    rule, (m, _) = layer.rule, inputs.shape
    shape, stored, solved = rule.shape, layer.stored, layer.solved
    if rows.most > MOST_ROWS:
        raise ValueError(f"{rows.most} rows of a sequence are more than {MOST_ROWS}")
    layout = DeltaLayout.of(layer, power_of_2(rows.most), shape.value_size, rows.trees, pdl)
    mixed = inputs.new_empty(m, shape.inputs)
    factors = gates.new_empty(m, shape.value_heads, layout.factors)
    sees = torch.empty(m, dtype=torch.int64, device=inputs.device)
    given = (rule.filters, rule.filters if rule.bias is None else rule.bias)
    _few[(shape.value_heads, rows.slots.shape[0])](
        *(inputs, inputs.stride(0), gates, *given, gates if rule.skip is None else rule.skip),
        *(stored.states, stored.inputs, stored.gates, stored.tails),
        *(solved.keys, solved.added, solved.misses, solved.solved, solved.sums, solved.sums.shape[0] - 1),
        *(rows.slots, rows.firsts, rows.counts, rows.starts, rows.bounds, rows.folds),
        *(rows.before, rows.positions, mixed, factors, sees, out, layout),
        num_warps=8 if rows.trees or layout.tile > 32 else 4,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )


@kernel
def _few(
    inputs, stride, gates, filters, bias, skip, states, ring, ring_gates, tails,
    keys, added, misses, solved, sums, last_slot, slots, firsts, counts, starts, bounds, folds,
    before, positions, mixed, factors, sees, out, layout: tl.constexpr,
):  # fmt: skip
    """Grid (value heads, B)."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    if layout.pdl:
        slot = tl.minimum(tl.maximum(tl.load(slots + sequence, volatile=True), 0), last_slot).to(tl.int64)
        behind = tl.load(starts + sequence, volatile=True) % COLUMNS
        _call_ahead(head, slot, behind, states, keys, added, misses, solved, layout)
    after_previous(layout.pdl)
    count = tl.load(counts + sequence)
    slot, first = tl.load(slots + sequence).to(tl.int64), tl.load(firsts + sequence).to(tl.int64)
    start, bound, stood = tl.load(starts + sequence), tl.load(folds + sequence), tl.load(bounds + sequence)
    if count == 0:
        return
    ring, tails = ring + slot * layout.input_stride, tails + slot * layout.tail_stride
    ring_gates += slot * layout.gate_stride + head
    heads = slot * layout.ring * layout.value_heads + head
    added, misses = added + heads * layout.value_size, misses + heads * layout.value_size
    solved, sums = solved + heads * COLUMNS, sums + heads
    keys += (slot * layout.ring * layout.key_heads + head // layout.group) * layout.key_size
    mixed, before = mixed + first * layout.inputs, before + first
    positions, sees = positions + first, sees + first
    gates += first * (2 * layout.value_heads) + head
    heads = first * layout.value_heads + head
    factors, out = factors + heads * layout.factors, out + heads * layout.value_size
    mix_heads(
        head, inputs + first * stride, stride, filters, bias, ring, tails, start, count, stood, before, mixed,
        layout,
    )  # fmt: skip
    sums_along(start, bound, count, gates, ring_gates, before, positions, sums, sees, layout)
    tl.debug_barrier()  # from here on, threads read what others wrote
    spans = (start, bound, count)
    kept = (keys, added, misses, solved, sums)
    factors_of(head, spans, gates, mixed, positions, sees, factors, kept, layout)
    tl.debug_barrier()
    if layout.corrects:
        solve_rows(spans, positions, factors, solved, layout)
    state = states + slot * layout.state_stride + head * (layout.key_size * layout.value_size)
    if stood != bound:
        _fold_due(state, stood, kept, layout)
        _keep_tail(head, bound, ring, tails, layout)
    tl.debug_barrier()
    if layout.skip:
        skip = tl.load(skip + head)
    given = (mixed, gates, skip, factors, sees, positions, out)
    _read_spans(head, spans, state, given, kept, layout)


@triton.jit
def _call_ahead(head, slot, behind, states, keys, added, misses, solved, layout: tl.constexpr):
    """Calls a slot's state, and what is kept of the `behind` last certain rows, into the L2 cache while the
    kernel ahead still runs: a hint, whose numbers may be old.
    """
    WIDE: tl.constexpr = 128 // 4
    LINE: tl.constexpr = 128 // (keys.dtype.element_ty.primitive_bitwidth // 8)
    row = tl.arange(0, layout.key_size)[:, None] * layout.value_size
    at = states + slot * layout.state_stride + head * (layout.key_size * layout.value_size)
    call_ahead(at + row + tl.arange(0, (layout.values + WIDE - 1) // WIDE)[None, :] * WIDE)
    row = slot * layout.ring + tl.minimum(tl.arange(0, COLUMNS), behind)
    line = tl.arange(0, (layout.key_size + LINE - 1) // LINE)[None, :] * LINE
    at_key = (row * layout.key_heads + head // layout.group)[:, None] * layout.key_size
    call_ahead(keys + at_key + line)
    at_head = (row * layout.value_heads + head)[:, None]
    line = tl.arange(0, (layout.values + LINE - 1) // LINE)[None, :] * LINE
    call_ahead(added + at_head * layout.value_size + line)
    if layout.corrects:
        call_ahead(misses + at_head * layout.value_size + line)
        call_ahead(solved + at_head * COLUMNS + tl.arange(0, COLUMNS // WIDE)[None, :] * WIDE)


@triton.jit
def _state_rows(begin, layout: tl.constexpr):
    """Where some rows of a state begin, the first of them `begin`, and which of their columns there are."""
    row, v = begin + tl.arange(0, layout.slice)[:, None], tl.arange(0, layout.values)[None, :]
    return row * layout.value_size + v, (row >= 0) & (v < layout.value_size)


@triton.jit
def _fold_due(state, stood, kept, layout: tl.constexpr):
    """Folds the rows behind a stored state, which stands at `stood`, into it."""
    keys, added, misses, solved, sums = kept
    place = (stood + tl.arange(0, COLUMNS)) % layout.ring
    every, every_sum, total = _added_along(place, added, sums, layout)
    for begin in range(0, layout.key_size, layout.slice):
        at, there = _state_rows(begin, layout)
        some = tl.load(state + at, mask=there & (stood > 0), other=0.0)
        some = folded(some, _keys_along(place, begin, keys, layout), every, every_sum, total)
        tl.store(state + at, some, mask=there)


@triton.jit
def _added_along(place, added, sums, layout: tl.constexpr):
    """What the rows in places `place` [64] of the ring add, their sums of decays, and the last one's."""
    v = tl.arange(0, layout.values)[None, :]
    at = (place * (layout.value_heads * layout.value_size))[:, None] + v
    every = tl.load(added + at, mask=v < layout.value_size, other=0.0)
    every_sum = tl.load(sums + place * layout.value_heads)
    last = tl.arange(0, COLUMNS) == COLUMNS - 1
    return every, every_sum, tl.sum(tl.where(last, every_sum, 0), 0)


@triton.jit
def _keys_along(place, begin, keys, layout: tl.constexpr):
    """Columns `begin` .. of the keys in places `place` [64] of the ring."""
    at = (place * (layout.key_heads * layout.key_size))[:, None]
    return tl.load(keys + at + begin + tl.arange(0, layout.slice)[None, :])


@triton.jit
def _keep_tail(head, bound, ring, tails, layout: tl.constexpr):
    """The tail of the state at `bound`, of the columns that a program answers for."""
    tap = tl.arange(0, triton.next_power_of_2(layout.kernel))
    real = (tap < layout.kernel - 1)[:, None]
    source = ring + ((bound - layout.kernel + 1 + tap) % layout.ring)[:, None] * layout.inputs
    target = tails + tap[:, None] * layout.inputs
    key_columns = layout.key_heads * layout.key_size
    v = tl.arange(0, layout.values)[None, :]
    there = real & (v < layout.value_size)
    v += 2 * key_columns + head * layout.value_size
    tl.store(target + v, tl.load(source + v, mask=there), mask=there)
    if head % layout.group == 0:
        q = head // layout.group * layout.key_size + tl.arange(0, layout.key_size)[None, :]
        tl.store(target + q, tl.load(source + q, mask=real), mask=real)
        k = q + key_columns
        tl.store(target + k, tl.load(source + k, mask=real), mask=real)


@triton.jit
def _read_spans(head, spans, state, given, kept, layout: tl.constexpr):
    """All rows read: first those before the next position of a state, then those behind it."""
    start, bound, count = spans
    mixed, gates, skip, factors, sees, positions, out = given
    row = tl.arange(0, layout.tile) % (layout.tile // 2)
    column = tl.load(positions + row, mask=row < count, other=0) - bound
    picked = (row < count) & (column < COLUMNS)
    known = _known(head, state, bound, row, picked, 0, kept, mixed, layout, False)
    _read_from(head, known, 0, picked, column, spans, given, kept, layout)
    if layout.width > 1:
        if tl.max(tl.where(row < count, column, 0), 0) >= COLUMNS:
            path = tl.full(row.shape, 0, tl.int64)
            if layout.tree:
                path = tl.load(sees + row, mask=row < count, other=0)
            tl.debug_barrier()
            for node in range(count):
                if tl.load(positions + node) - bound == COLUMNS - 1:
                    number, there = _numbers(tl.arange(0, COLUMNS), node, column, spans, sees, layout)
                    picked = (row < count) & (column >= COLUMNS)
                    if layout.tree:
                        picked = picked & (((path >> node) & 1) != 0)
                    place = number % layout.ring
                    known = _known(head, state, bound, row, picked, place, kept, mixed, layout, True)
                    _read_from(head, known, 1, picked, column, spans, given, kept, layout)


@triton.jit
def _known(head, state, bound, row, picked, place, kept, mixed, layout: tl.constexpr, FOLD: tl.constexpr):
    """What a state has for keys and queries, [tile, n]: the stored one, or, if FOLD, that behind 64 rows, in
    the places `place`, which is never stored.
    """
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    keys, added, misses, solved, sums = kept
    side = tl.where(tl.arange(0, layout.tile) >= layout.tile // 2, 0, layout.key_heads)
    at_kq = row * layout.inputs + (side + head // layout.group) * layout.key_size
    at_kq = mixed + at_kq[:, None] + tl.arange(0, layout.slice)[None, :]
    high = tl.full((layout.tile, layout.values), 0.0, tl.float32)
    low = high
    if FOLD:
        every, every_sum, total = _added_along(place, added, sums, layout)
    at, there = _state_rows(0, layout)
    there = there & (bound > 0)
    some = tl.load(state + at, mask=there, other=0.0)
    for begin in range(0, layout.key_size, layout.slice):
        following = (begin + layout.slice) * layout.value_size
        more = there & (begin + layout.slice < layout.key_size)
        then = tl.load(state + at + following, mask=more, other=0.0)  # while these are read
        kq = tl.load(at_kq + begin, mask=picked[:, None], other=0.0)
        if FOLD:
            some = folded(some, _keys_along(place, begin, keys, layout), every, every_sum, total)
        high, low = rows_times_onto(kq, some, high, low, DTYPE)
        some = then
    return apart(high, low)


@triton.jit
def _read_from(head, known, span: tl.constexpr, picked, column, spans, given, kept, layout: tl.constexpr):
    """The rows `picked` read a state that stands `span` spans behind `bound`, and has `known` for them. In a
    tile, rows stand as keys, then as queries.
    """
    start, bound, count = spans
    mixed, gates, skip, factors, sees, positions, out = given
    keys, added, misses, solved, sums = kept
    row = tl.arange(0, layout.tile) % (layout.tile // 2)
    asks = tl.arange(0, layout.tile) >= layout.tile // 2
    adds, asked = picked & (asks == 0), picked & asks
    v = tl.arange(0, layout.values)[None, :]
    there = v < layout.value_size
    at = row[:, None] * layout.inputs + 2 * layout.key_heads * layout.key_size + head * layout.value_size
    values = tl.load(mixed + at + v, mask=picked[:, None] & there, other=0.0)
    beta = tl.load(gates + row * (2 * layout.value_heads) + layout.value_heads, mask=adds, other=0.0)
    place = (start + row) % layout.ring * layout.value_heads
    own_sums = tl.load(sums + place, mask=picked, other=0)
    at_added = place[:, None] * layout.value_size + v
    if layout.corrects:
        made = missed(values, beta, own_sums, known)
        tl.store(misses + at_added, made, mask=adds[:, None] & there)
        none = tl.full(known.shape, 0.0, tl.float32)
        new = _onto(none, solved + place * COLUMNS, span, adds, column, spans, misses, sees, layout)
    else:
        new = beta[:, None] * values.to(tl.float32)
    tl.store(added + at_added, new.to(values.dtype), mask=adds[:, None] & there)
    result = read(known, layout.scale, own_sums)
    weights = factors + row * (layout.value_heads * layout.factors) + COLUMNS + layout.width
    result = _onto(result, weights, span, asked, column, spans, added, sees, layout)
    if layout.skip:
        result += values.to(tl.float32) * skip
    at = row[:, None] * (layout.value_heads * layout.value_size) + v
    tl.store(out + at, result.to(out.dtype.element_ty), mask=asked[:, None] & there)


@triton.jit
def _onto(acc, factors, span: tl.constexpr, picked, column, spans, stored, sees, layout: tl.constexpr):
    """acc [tile, n], and for the rows `picked` what is `stored` for their paths' rows in the ring, in part by
    other threads just now: by the factors [64] of a span's columns to which `factors` [tile] point. Columns
    are taken by `STEP`, as far as a row has some.
    """
    DTYPE: tl.constexpr = stored.dtype.element_ty
    start, bound, count = spans
    first = span * COLUMNS
    own = tl.where(picked, column - first, -1)
    whole = tl.max(own, 0) + 1
    if layout.tree:  # columns of certain rows alone: all rows at once
        whole = tl.maximum((start - bound) // STEP - span * (COLUMNS // STEP), 0) * STEP
    tl.debug_barrier()
    for begin in range(0, whole, STEP):
        some = begin + tl.arange(0, STEP)
        rows = tl.load(factors[:, None] + some[None, :], mask=some[None, :] <= own[:, None], other=0.0)
        every = _stored_along(some + first, 0, column, spans, stored, sees, layout)
        acc = tl.dot(rows.to(DTYPE), every, acc, input_precision="ieee")
    if layout.tree:
        row = tl.arange(0, layout.tile) % (layout.tile // 2)
        steps = tl.maximum(tl.max(own, 0) + STEP - whole, 0) // STEP
        for turn in range(count * steps):
            node = turn // steps
            some = whole + turn % steps * STEP + tl.arange(0, STEP)
            near = (row == node)[:, None] & (some[None, :] <= own[:, None])
            rows = tl.load(factors[:, None] + some[None, :], mask=near, other=0.0)
            every = _stored_along(some + first, node, column, spans, stored, sees, layout)
            acc = tl.dot(rows.to(DTYPE), every, acc, input_precision="ieee")
    return acc


@triton.jit
def _stored_along(at, node, column, spans, stored, sees, layout: tl.constexpr):
    """What is stored, [m, n], for the rows in the columns `at` [m] of a node's path; zeros for none."""
    v = tl.arange(0, layout.values)[None, :]
    number, there = _numbers(at, node, column, spans, sees, layout)
    mask = there[:, None] & (v < layout.value_size)
    place = number % layout.ring * (layout.value_heads * layout.value_size)
    return tl.load(stored + place[:, None] + v, mask=mask, other=0.0)


@triton.jit
def _numbers(at, node, column, spans, sees, layout: tl.constexpr):
    """The numbers of the rows in the columns `at` [m] along the path of a node, and whether there is one."""
    start, bound, count = spans
    if layout.tree:
        path = tl.load(sees + node)
        row = tl.arange(0, layout.tile) % (layout.tile // 2)
        first = tl.arange(0, layout.tile) < layout.tile // 2
        on = (row < count) & first & (((path >> row) & 1) != 0)
        matches = on[None, :] & (column[None, :] == at[:, None])
        found = tl.sum(tl.where(matches, row[None, :], 0), 1)
        there = tl.sum(matches.to(tl.int32), 1) > 0
        certain = bound + at < start
        return tl.where(certain, bound + at, start + found), certain | there
    else:
        return bound + at, bound + at < start + count
