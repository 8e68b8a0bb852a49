"""The gated delta rule over prompts: chunks of 64 rows at multiples of 64, so that no cut changes a bit.

A sequence's first chunk begins at its state's position: rows that came before this forward are made again
from the ring. One kernel makes `solved` and `weights` (see `order`) of all chunks at once, the next one walks
through a sequence's chunks with its state in registers; value columns are independent, and so a head has
several programs. The rows behind the last full chunk are kept as few rows keep theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.states.mixing import convolved, normed, numbers_back
from eyas.engine.kernels.states.order import (
    COLUMNS,
    STEP,
    DeltaLayer,
    DeltaLayout,
    corrections,
    folded,
    missed,
    product,
    read,
    readings,
    rows_times,
    shares_of,
    solve_behind,
    solve_further,
    ticks,
)
from eyas.engine.states.rows import StateRows
from eyas.engine.states.shape import SPAN

_BLOCK = 32  # columns of a value head to a program that walks


@dataclass(frozen=True)
class Chunks:
    """The chunks of a forward's sequences: `chunks` int32 [C, 2], each one's sequence and first row number;
    `ends` int32 [B]: behind each sequence's last chunk. Both on the device.
    """

    chunks: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, bounds: Sequence[int], ends: Sequence[int], device: torch.device | str) -> Chunks:
        """Those of sequences whose states stand at `bounds`, and whose rows end at `ends`."""
        table: list[tuple[int, int]] = []
        behind: list[int] = []
        for sequence, (bound, end) in enumerate(zip(bounds, ends, strict=True)):
            table += [(sequence, first) for first in range(bound, end, SPAN)]
            behind.append(len(table))
        both = (torch.tensor(each, dtype=torch.int32, device=device) for each in (table, behind))
        return cls(*both)


def recur_chunks(
    inputs: torch.Tensor,
    gates: torch.Tensor,
    layer: DeltaLayer,
    rows: StateRows,
    chunks: Chunks,
) -> torch.Tensor:
    """As `few.recur_few`, of any number of rows, which are certain and stand in their order.

    A sequence without rows is one whose `SolvedRows` are made again, after its slot came from elsewhere.
    """
    stored, solved = layer.stored, layer.solved
    shape, (m, _), count = layer.rule.shape, inputs.shape, chunks.chunks.shape[0]
    layout = DeltaLayout.of(layer, SPAN, _BLOCK)
    mixed = inputs.new_empty(count * SPAN, shape.inputs)
    every = gates.new_empty(count * SPAN, shape.gates)
    where = (chunks.chunks, rows.slots, rows.firsts, rows.counts, rows.starts)
    given = (inputs, inputs.stride(0), gates, layer.rule.filters, stored.inputs, stored.gates, stored.tails)
    options = {"num_warps": 8, "enable_fp_fusion": False}
    heads = 2 * shape.key_heads + shape.value_heads
    _mix[(heads, count)](*given, *where, rows.bounds, mixed, every, layout, **options)
    ends = (rows.slots, rows.firsts, rows.counts, rows.starts, rows.bounds, rows.folds)
    _keep_rows[(heads, rows.slots.shape[0])](
        *(inputs, inputs.stride(0), gates, stored.inputs, stored.gates, stored.tails, *ends, layout),
        **options,
    )
    factors = gates.new_empty(2, count * SPAN, shape.value_heads, SPAN)
    sums = torch.empty(count * SPAN, shape.value_heads, dtype=torch.int64, device=inputs.device)
    _solve[(shape.value_heads, count)](
        *(mixed, every, factors[0], factors[1], sums, solved.keys, solved.solved, solved.sums),
        *(*where, rows.folds, layout),
        num_warps=4,
        enable_fp_fusion=False,
    )
    out = inputs.new_zeros(m, shape.value_heads * shape.value_size)
    _walk[(shape.value_heads * layout.blocks, rows.slots.shape[0])](
        *(mixed, every, factors[0], factors[1], sums, stored.states, solved.misses),
        *(chunks.ends, *ends, out, layout),
        **options,
    )
    return out


@kernel
def _mix(
    inputs, stride, gates, filters, ring, ring_gates, tails, chunks, slots, firsts, counts, starts, bounds,
    mixed, every, layout: tl.constexpr,
):  # fmt: skip
    """Grid (heads of q, k and v, chunks): rows that are not there are zeros."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    sequence, base = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    slot, first = tl.load(slots + sequence).to(tl.int64), tl.load(firsts + sequence)
    start, bound = tl.load(starts + sequence), tl.load(bounds + sequence)
    end = start + tl.load(counts + sequence)
    row = tl.arange(0, COLUMNS)
    number = base + row
    real = number < end
    lowest = base - layout.kernel + 1
    numbers = numbers_back(number, real, None, start, layout)
    at = mixed + chunk.to(tl.int64) * (COLUMNS * layout.inputs) + row[:, None] * layout.inputs
    inputs += (first + base - start).to(tl.int64) * stride
    ring += slot * layout.input_stride
    tails += slot * layout.tail_stride
    if head < 2 * layout.key_heads:
        q = head * layout.key_size + tl.arange(0, layout.key_size)
        x = convolved(
            numbers, real, q, lowest, filters, inputs, stride, base, start, ring, tails, bound, layout
        )
        x = tl.where(real[:, None], normed(x), 0.0)
        tl.store(at + q[None, :], x.to(mixed.dtype.element_ty))
    else:
        head -= 2 * layout.key_heads
        v = 2 * layout.key_heads * layout.key_size + head * layout.value_size
        v += tl.arange(0, layout.value_size)
        made = convolved(
            numbers, real, v, lowest, filters, inputs, stride, base, start, ring, tails, bound, layout
        )
        made = tl.where(real[:, None], made, 0.0)
        tl.store(at + v[None, :], made.to(mixed.dtype.element_ty))
        ring_gates += slot * layout.gate_stride + head
        every += chunk.to(tl.int64) * (COLUMNS * 2 * layout.value_heads) + head
        _gates_of(number, real, row, gates + head, first, start, ring_gates, every, layout)
        step = layout.value_heads
        _gates_of(
            number, real, row, gates + head + step, first, start, ring_gates + step, every + step, layout
        )


@triton.jit
def _gates_of(number, real, row, gates, first, start, ring, every, layout: tl.constexpr):
    """One gate of a chunk's rows, read from the forward or from the ring; zero for missing rows."""
    place = (first + number - start).to(tl.int64) * (2 * layout.value_heads)
    new = tl.load(gates + place, mask=real & (number >= start), other=0.0)
    place = number % layout.ring * (2 * layout.value_heads)
    old = tl.load(ring + place, mask=real & (number < start), other=0.0)
    tl.store(every + row * (2 * layout.value_heads), tl.where(number >= start, new, old))


@kernel
def _keep_rows(
    inputs, stride, gates, ring, ring_gates, tails, slots, firsts, counts, starts, bounds, folds,
    layout: tl.constexpr,
):  # fmt: skip
    """Grid (heads of q, k and v, B): the ring gets rows behind the last full chunk, the tail those before."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    slot, first = tl.load(slots + sequence).to(tl.int64), tl.load(firsts + sequence)
    start, fold = tl.load(starts + sequence), tl.load(folds + sequence)
    end = start + tl.load(counts + sequence)
    moved = fold != tl.load(bounds + sequence)
    inputs += (first + fold - start).to(tl.int64) * stride
    ring += slot * layout.input_stride
    tails += slot * layout.tail_stride
    if head < 2 * layout.key_heads:
        column = head * layout.key_size + tl.arange(0, layout.key_size)
        _keep_columns(column, inputs, stride, ring, tails, start, fold, end, moved, layout)
    else:
        head -= 2 * layout.key_heads
        v = 2 * layout.key_heads * layout.key_size + head * layout.value_size
        v += tl.arange(0, layout.value_size)
        _keep_columns(v, inputs, stride, ring, tails, start, fold, end, moved, layout)
        number = fold + tl.arange(0, COLUMNS)
        real = (number >= start) & (number < end)
        source = gates + (first + number - start).to(tl.int64) * (2 * layout.value_heads) + head
        target = ring_gates + slot * layout.gate_stride + head
        target += number % layout.ring * (2 * layout.value_heads)
        tl.store(target, tl.load(source, mask=real), mask=real)
        tl.store(target + layout.value_heads, tl.load(source + layout.value_heads, mask=real), mask=real)


@triton.jit
def _keep_columns(
    column, inputs, stride, ring, tails, start, fold, end, moved, layout: tl.constexpr
):  # fmt: skip
    """`inputs` points at the sequence's row `fold`."""
    column = column[None, :]
    number = (fold + tl.arange(0, COLUMNS))[:, None]
    real = (number >= start) & (number < end)
    x = tl.load(inputs + (number - fold) * stride + column, mask=real)
    tl.store(ring + number % layout.ring * layout.inputs + column, x, mask=real)
    tap = tl.arange(0, triton.next_power_of_2(layout.kernel))[:, None]
    number = fold - layout.kernel + 1 + tap
    real = moved & (tap < layout.kernel - 1)
    new = tl.load(inputs + (number - fold) * stride + column, mask=real & (number >= start))
    old = tl.load(ring + number % layout.ring * layout.inputs + column, mask=real & (number < start))
    tl.store(tails + tap * layout.inputs + column, tl.where(number >= start, new, old), mask=real)


@kernel
def _solve(
    mixed, every, solved, weights, sums, ring_keys, ring_solved, ring_sums,
    chunks, slots, firsts, counts, starts, folds, layout: tl.constexpr,
):  # fmt: skip
    """Grid (value heads, chunks). Rows behind the last `STEP` that has one are left as they are."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    sequence, base = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    count = tl.minimum(tl.load(starts + sequence) + tl.load(counts + sequence) - base, COLUMNS)
    unfolded = base == tl.load(folds + sequence)
    ring = tl.load(slots + sequence).to(tl.int64) * layout.ring
    first = chunk.to(tl.int64) * COLUMNS
    mixed += first * layout.inputs + head // layout.group * layout.key_size
    every += first * (2 * layout.value_heads) + head
    heads = first * layout.value_heads + head
    sums, solved, weights = sums + heads, solved + heads * COLUMNS, weights + heads * COLUMNS
    heads = ring * layout.value_heads + head
    ring_sums, ring_solved = ring_sums + heads, ring_solved + heads * COLUMNS
    ring_keys += (ring * layout.key_heads + head // layout.group) * layout.key_size
    own = tl.arange(0, COLUMNS)[None, :]
    dim = tl.arange(0, layout.key_size)[None, :]
    every_row = tl.arange(0, COLUMNS)
    decays = tl.load(every + every_row * (2 * layout.value_heads))
    tl.store(sums + every_row * layout.value_heads, tl.cumsum(ticks(decays), 0))
    tl.debug_barrier()  # what follows reads what other threads wrote
    for begin in range(0, count, STEP):
        row = begin + tl.arange(0, STEP)
        q, k, own_sums = _chunk_rows(mixed, sums, row, dim, layout)
        beta = tl.load(every + row * (2 * layout.value_heads) + layout.value_heads)
        made = tl.where(row[:, None] == own, 1.0, 0.0)
        used = tl.full(made.shape, 0.0, tl.float32)
        for before in range(0, begin, STEP):
            column = before + tl.arange(0, STEP)
            _, keys, column_sums = _chunk_rows(mixed, sums, column, dim, layout)
            column_solved = tl.load(solved + column[:, None] * (layout.value_heads * COLUMNS) + own)
            near = (row[:, None] >= 0) & (column[None, :] >= 0)
            made, used = solve_behind(
                made, used, k, q, beta, own_sums, keys, column_sums, column_solved, near, layout.scale
            )
        below = corrections(k, k, beta, own_sums, own_sums, row[:, None] > row[None, :])
        seen = readings(q, k, layout.scale, own_sums, own_sums, row[:, None] >= row[None, :])
        made, used = solve_further(made, used, below, seen, STEP)
        at = row[:, None] * (layout.value_heads * COLUMNS) + own
        tl.store(solved + at, made)
        tl.store(weights + at, used)
        if unfolded:
            place = (base + row) % layout.ring
            real = row < count
            at_solved = place[:, None] * (layout.value_heads * COLUMNS) + own
            tl.store(ring_solved + at_solved, made, mask=real[:, None])
            tl.store(ring_sums + place * layout.value_heads, own_sums, mask=real)
            if head % layout.group == 0:
                at_key = place[:, None] * (layout.key_heads * layout.key_size) + dim
                tl.store(ring_keys + at_key, k, mask=real[:, None])
        tl.debug_barrier()


@triton.jit
def _chunk_rows(mixed, sums, row, dim, layout: tl.constexpr):
    """Queries, keys and sums of rows of chunks."""
    at = mixed + row[:, None] * layout.inputs + dim
    keys = tl.load(at + layout.key_heads * layout.key_size)
    return tl.load(at), keys, tl.load(sums + row * layout.value_heads)


@kernel
def _walk(
    mixed, every, solved, weights, sums, states, ring_misses, ends,
    slots, firsts, counts, starts, bounds, folds, out, layout: tl.constexpr,
):  # fmt: skip
    """Grid (value heads * blocks, B)."""
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    sequence = tl.program_id(1)
    head, block = tl.program_id(0) // layout.blocks, tl.program_id(0) % layout.blocks
    slot, first = tl.load(slots + sequence).to(tl.int64), tl.load(firsts + sequence)
    start, bound = tl.load(starts + sequence), tl.load(bounds + sequence)
    fold, count = tl.load(folds + sequence), tl.load(counts + sequence)
    spans = tl.cdiv(start + count - bound, COLUMNS)
    first_row = (tl.load(ends + sequence) - spans).to(tl.int64) * COLUMNS
    dim, row = tl.arange(0, layout.key_size), tl.arange(0, COLUMNS)
    v_column = block * layout.block + tl.arange(0, layout.block)[None, :]
    at_state = states + slot * layout.state_stride + head * (layout.key_size * layout.value_size)
    at_state += dim[:, None] * layout.value_size + v_column
    state = tl.load(at_state, mask=(dim >= 0)[:, None] & (bound > 0), other=0.0)
    mixed += first_row * layout.inputs + head // layout.group * layout.key_size
    every += first_row * (2 * layout.value_heads) + layout.value_heads + head
    heads = first_row * layout.value_heads + head
    sums, solved, weights = sums + heads, solved + heads * COLUMNS, weights + heads * COLUMNS
    out += ((first + bound - start).to(tl.int64) * layout.value_heads + head) * layout.value_size
    ring_misses += (slot * layout.ring * layout.value_heads + head) * layout.value_size
    at_key = row[:, None] * layout.inputs + dim[None, :]
    at_factor = row[:, None] * (layout.value_heads * COLUMNS) + row[None, :]
    at_value = row[:, None] * (layout.value_heads * layout.value_size) + v_column
    v_first = 2 * layout.key_heads * layout.key_size - head // layout.group * layout.key_size
    v_first += head * layout.value_size
    lower = row[None, :] // STEP <= row[:, None] // STEP  # as fine as several elements are read at once
    for span in range(spans):
        number = bound + span * COLUMNS + row
        q, k = tl.load(mixed + at_key), tl.load(mixed + layout.key_heads * layout.key_size + at_key)
        values = tl.load(mixed + v_first + row[:, None] * layout.inputs + v_column)
        beta = tl.load(every + row * (2 * layout.value_heads))
        own_sums = tl.load(sums + row * layout.value_heads)
        made = tl.load(solved + at_factor, mask=lower, other=0.0)
        used = tl.load(weights + at_factor, mask=lower, other=0.0)
        misses = missed(values, beta, own_sums, rows_times(k, state, DTYPE))
        acc = product(used, misses, DTYPE)
        result = read(rows_times(q, state, DTYPE), layout.scale, own_sums, acc)
        real = number < start + count
        tl.store(out + at_value, result.to(out.dtype.element_ty), mask=(real & (number >= start))[:, None])
        if bound + span * COLUMNS == fold:
            at_miss = (number % layout.ring)[:, None] * (layout.value_heads * layout.value_size) + v_column
            tl.store(ring_misses + at_miss, misses, mask=real[:, None])
        else:
            total = tl.sum(tl.where(row == COLUMNS - 1, own_sums, 0), 0)
            shares = shares_of(made, misses, own_sums, total, DTYPE)
            state = folded(state, k, shares, total, DTYPE)
        mixed += COLUMNS * layout.inputs
        every += COLUMNS * 2 * layout.value_heads
        sums += COLUMNS * layout.value_heads
        solved += COLUMNS * layout.value_heads * COLUMNS
        weights += COLUMNS * layout.value_heads * COLUMNS
        out += COLUMNS * layout.value_heads * layout.value_size
    tl.store(at_state, state, mask=(dim >= 0)[:, None] & (fold != bound))
