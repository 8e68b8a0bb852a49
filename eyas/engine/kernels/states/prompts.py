"""Layers with a state over prompts: chunks of 64 rows at multiples of 64, so that no cut changes a bit.

A sequence's first chunk begins at its state's position: rows that came before this forward are made again
from the ring. Two kernels make p and `solved` (see `order`) of all chunks at once, the next one walks
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
from eyas.engine.kernels.states.order import (
    COLUMNS,
    STEP,
    DeltaLayer,
    DeltaLayout,
    folded,
    missed,
    product,
    read,
    rows_times,
    ticks,
    weighed,
)
from eyas.engine.kernels.states.prompt_mix import mix_rows
from eyas.engine.states.rows import StateRows
from eyas.engine.states.shape import SPAN

_BLOCK = 32  # columns of a value head to a program that walks
_AT_ONCE = 4  # sequences that programs walk through side by side: of one alone they fill a GPU
_SOLVERS = 1  # warps of a program that solves: a thread has two columns
_STAGES, _STAGE_BYTES = (
    3,
    1024,
)  # chunks that a program which walks has in shared memory; of keys in all of them


@dataclass(frozen=True)
class Chunks:
    """The chunks of a forward's sequences: `chunks` int32 [C, 2], each one's sequence and first row number;
    `ends` int32 [B]: behind each sequence's last chunk. Both on the device.
    """

    chunks: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, bounds: Sequence[int], ends: Sequence[int], device: torch.device | str) -> Chunks:
        """The chunks of sequences whose states stand at `bounds`, and whose rows end at `ends`."""
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
    out: torch.Tensor,
) -> None:
    """Recurs over any number of rows, which are certain and stand in their order, as `few.recur_few` does
    over few.

    A sequence without rows is one whose `SolvedRows` are made again, after its slot came from elsewhere.
    """
    rule, stored, solved = layer.rule, layer.stored, layer.solved
    shape, count = rule.shape, chunks.chunks.shape[0]
    layout = DeltaLayout.of(layer, SPAN, _BLOCK)
    mixed = inputs.new_empty(count * SPAN, shape.inputs)
    every = gates.new_empty(count * SPAN, shape.gates)
    where = (chunks.chunks, rows.slots, rows.firsts, rows.counts, rows.starts)
    given = (inputs, inputs.stride(0), gates, rule.filters, rule.filters if rule.bias is None else rule.bias)
    heads = 2 * shape.key_heads + shape.value_heads
    mix_rows[(heads, count)](
        *(*given, stored.inputs, stored.gates, stored.tails, *where, rows.bounds, mixed, every, layout),
        num_warps=8,
        enable_fp_fusion=False,
    )
    ends = (rows.slots, rows.firsts, rows.counts, rows.starts, rows.bounds, rows.folds)
    _keep_rows[(heads, rows.slots.shape[0])](
        *(inputs, inputs.stride(0), gates, stored.inputs, stored.gates, stored.tails, *ends, layout),
        num_warps=8,
        enable_fp_fusion=False,
    )
    squares = (count, shape.value_heads, SPAN, SPAN)
    below = gates.new_empty(2, *squares if shape.corrects else (0,))
    factors = inputs.new_empty(2, *squares)
    sums = torch.empty(count, shape.value_heads, SPAN, dtype=torch.int64, device=inputs.device)
    _factors[(shape.value_heads, count)](
        *(mixed, every, below[0], factors[1], sums, solved.keys, solved.sums, *where, rows.folds, layout),
        num_warps=4,
        enable_fp_fusion=False,
    )
    if shape.corrects:
        _solve[(shape.value_heads, count)](
            *(*below, factors[0], solved.solved, chunks.chunks),
            *(rows.slots, rows.counts, rows.starts, rows.folds, layout),
            num_warps=_SOLVERS,
            enable_fp_fusion=False,
        )
    sequences = rows.slots.shape[0]
    _walk[(shape.value_heads * layout.blocks, min(sequences, _AT_ONCE))](
        *(mixed, every, gates if rule.skip is None else rule.skip, *factors, sums, stored.states),
        *(solved.added, solved.misses, chunks.chunks, chunks.ends, *ends, out, sequences, layout),
        num_warps=4,
        num_stages=max(1, min(_STAGES, _STAGE_BYTES // (shape.key_size * inputs.element_size()))),
        enable_fp_fusion=False,
    )


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
        key = tl.arange(0, layout.key_size)
        _keep_columns(
            head * layout.key_size + key,
            key >= 0,
            inputs,
            stride,
            ring,
            tails,
            start,
            fold,
            end,
            moved,
            layout,
        )
    else:
        head -= 2 * layout.key_heads
        value = tl.arange(0, layout.values)
        v = 2 * layout.key_heads * layout.key_size + head * layout.value_size + value
        _keep_columns(
            v, value < layout.value_size, inputs, stride, ring, tails, start, fold, end, moved, layout
        )
        number = fold + tl.arange(0, COLUMNS)
        real = (number >= start) & (number < end)
        source = gates + (first + number - start).to(tl.int64) * (2 * layout.value_heads) + head
        target = ring_gates + slot * layout.gate_stride + head
        target += number % layout.ring * (2 * layout.value_heads)
        tl.store(target, tl.load(source, mask=real), mask=real)
        tl.store(target + layout.value_heads, tl.load(source + layout.value_heads, mask=real), mask=real)


@triton.jit
def _keep_columns(
    column, there, inputs, stride, ring, tails, start, fold, end, moved, layout: tl.constexpr
):  # fmt: skip
    """`inputs` points at the sequence's row `fold`."""
    column, there = column[None, :], there[None, :]
    number = (fold + tl.arange(0, COLUMNS))[:, None]
    real = (number >= start) & (number < end) & there
    x = tl.load(inputs + (number - fold) * stride + column, mask=real)
    tl.store(ring + number % layout.ring * layout.inputs + column, x, mask=real)
    tap = tl.arange(0, triton.next_power_of_2(layout.kernel))[:, None]
    number = fold - layout.kernel + 1 + tap
    real = moved & (tap < layout.kernel - 1) & there
    new = tl.load(inputs + (number - fold) * stride + column, mask=real & (number >= start))
    old = tl.load(ring + number % layout.ring * layout.inputs + column, mask=real & (number < start))
    tl.store(tails + tap * layout.inputs + column, tl.where(number >= start, new, old), mask=real)


@kernel
def _factors(
    mixed, every, below, weights, sums, ring_keys, ring_sums,
    chunks, slots, firsts, counts, starts, folds, layout: tl.constexpr,
):  # fmt: skip
    """Grid (value heads, chunks): p, and `below` float32, the factors of `solved`; [64, 64] for each."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    sequence, base = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    count = tl.minimum(tl.load(starts + sequence) + tl.load(counts + sequence) - base, COLUMNS)
    if count <= 0:
        return
    first = chunk.to(tl.int64) * COLUMNS
    mixed += first * layout.inputs + head // layout.group * layout.key_size
    every += first * (2 * layout.value_heads) + head
    square = (chunk.to(tl.int64) * layout.value_heads + head) * COLUMNS
    sums += square
    square *= COLUMNS
    row, dim = tl.arange(0, COLUMNS), tl.arange(0, layout.key_size)[None, :]
    own = tl.cumsum(ticks(tl.load(every + row * (2 * layout.value_heads))), 0)
    tl.store(sums + row, own)
    tl.debug_barrier()  # what follows reads what other threads wrote
    column_sums = tl.load(sums + row)
    at = mixed + row[:, None] * layout.inputs + dim
    q, k = tl.load(at), tl.load(at + layout.key_heads * layout.key_size)
    at_square = square + row[:, None] * COLUMNS + row[None, :]
    scale = tl.full(row.shape, layout.scale, tl.float32)
    used = weighed(q, k, scale, column_sums, column_sums, row[:, None] >= row[None, :])
    tl.store(weights + at_square, used.to(weights.dtype.element_ty))
    if layout.corrects:
        beta = tl.load(every + row * (2 * layout.value_heads) + layout.value_heads)
        made = weighed(k, k, -beta, column_sums, column_sums, row[:, None] > row[None, :])
        tl.store(below + at_square, made)
    if base == tl.load(folds + sequence):
        ring = tl.load(slots + sequence).to(tl.int64) * layout.ring
        place, real = (base + row) % layout.ring, row < count
        heads = ring * layout.value_heads + head
        tl.store(ring_sums + heads + place * layout.value_heads, column_sums, mask=real)
        if head % layout.group == 0:
            ring_keys += (ring * layout.key_heads + head // layout.group) * layout.key_size
            at_key = place[:, None] * (layout.key_heads * layout.key_size) + dim
            tl.store(ring_keys + at_key, k, mask=real[:, None])


@kernel
def _solve(
    below, whole, solved, ring_solved, chunks, slots, counts, starts, folds, layout: tl.constexpr
):  # fmt: skip
    """Grid (value heads, chunks): `whole` float32 [64, 64] for each, and, rounded, `solved`."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    sequence, base = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    count = tl.load(starts + sequence) + tl.load(counts + sequence) - base
    if count <= 0:
        return
    square = (chunk.to(tl.int64) * layout.value_heads + head) * (COLUMNS * COLUMNS)
    _solve_chunk(below + square, whole + square, solved + square)
    if base == tl.load(folds + sequence):
        first = tl.load(slots + sequence).to(tl.int64) * layout.ring
        own = tl.arange(0, COLUMNS)[None, :]
        for begin in range(0, count, STEP):
            row = begin + tl.arange(0, STEP)
            place = (first + (base + row) % layout.ring) * layout.value_heads + head
            made = tl.load(whole + square + row[:, None] * COLUMNS + own)
            tl.store(ring_solved + place[:, None] * COLUMNS + own, made, mask=(row < count)[:, None])


@triton.jit
def _solve_chunk(below, whole, solved):
    """`whole` [64, 64] and, rounded, `solved`, by the factors `below`; `STEP` rows at a time."""
    own = tl.arange(0, COLUMNS)[None, :]
    for begin in range(0, COLUMNS, STEP):
        row = (begin + tl.arange(0, STEP))[:, None]
        made = tl.where(row == own, 1.0, 0.0)
        tl.debug_barrier()
        for before in range(0, begin, STEP):
            column = before + tl.arange(0, STEP)
            factors = tl.load(below + row * COLUMNS + column[None, :])
            rows = tl.load(whole + column[:, None] * COLUMNS + own)
            made = tl.dot(factors, rows, made, input_precision="ieee")
        tl.store(whole + row * COLUMNS + own, made)
        tl.debug_barrier()
        _solve_step(below + begin * (COLUMNS + 1), whole + begin * COLUMNS, solved + begin * COLUMNS)
    tl.debug_barrier()


@triton.jit
def _solve_step(below, whole, solved):
    """`STEP` rows of `whole`, which have all columns before these rows, by their factors of one another. A
    thread has its columns of all rows, so that none waits for another.
    """
    own = tl.arange(0, COLUMNS)
    rows = ()
    for r in tl.static_range(STEP):
        made = tl.load(whole + r * COLUMNS + own)
        for c in tl.static_range(r):
            factor = tl.load(below + r * COLUMNS + c)
            made = tl.fma(tl.full(own.shape, factor, tl.float32), rows[c], made)
        rows = rows + (made,)  # type: ignore[assignment]
    for r in tl.static_range(STEP):
        tl.store(whole + r * COLUMNS + own, rows[r])
        tl.store(solved + r * COLUMNS + own, rows[r].to(solved.dtype.element_ty))


@kernel(do_not_specialize=["sequences"])
def _walk(
    mixed, every, skip, solved, weights, sums, states, ring_added, ring_misses, chunks, ends,
    slots, firsts, counts, starts, bounds, folds, out, sequences, layout: tl.constexpr,
):  # fmt: skip
    """Grid (value heads * blocks, sequences at once). Those behind the last one with a chunk are padding, of
    which a graph may have many: programs for them would take as long as a few chunks.
    """
    last = tl.load(ends + sequences - 1) - 1
    if last < 0:
        return
    given = (mixed, every, skip, solved, weights, sums, states, ring_added, ring_misses)
    table = (ends, slots, firsts, counts, starts, bounds, folds)
    for sequence in range(tl.program_id(1), tl.load(chunks + 2 * last) + 1, tl.num_programs(1)):
        _walk_through(sequence, given, table, out, layout)


@triton.jit
def _walk_through(sequence, given, table, out, layout: tl.constexpr):
    """One sequence, by the columns of this program."""
    mixed, every, skip, solved, weights, sums, states, ring_added, ring_misses = given
    ends, slots, firsts, counts, starts, bounds, folds = table
    head, block = tl.program_id(0) // layout.blocks, tl.program_id(0) % layout.blocks
    slot, first = tl.load(slots + sequence).to(tl.int64), tl.load(firsts + sequence)
    start, bound = tl.load(starts + sequence), tl.load(bounds + sequence)
    fold, count = tl.load(folds + sequence), tl.load(counts + sequence)
    spans = tl.cdiv(start + count - bound, COLUMNS)
    chunk = (tl.load(ends + sequence) - spans).to(tl.int64)
    dim = tl.arange(0, layout.key_size)[:, None]
    v = block * layout.block + tl.arange(0, layout.block)[None, :]
    there = v < layout.value_size
    at_state = states + slot * layout.state_stride + head * (layout.key_size * layout.value_size)
    at_state += dim * layout.value_size + v
    state = tl.load(at_state, mask=there & (dim >= 0) & (bound > 0), other=0.0)
    mixed += chunk * (COLUMNS * layout.inputs)
    every += chunk * (COLUMNS * 2 * layout.value_heads) + layout.value_heads + head
    square = (chunk * layout.value_heads + head) * COLUMNS
    sums += square
    square *= COLUMNS
    given = (mixed, every, solved + square, weights + square, sums)
    out += ((first + bound - start).to(tl.int64) * layout.value_heads + head) * layout.value_size
    if layout.skip:
        skip = tl.load(skip + head)
    reads = (bound, start, start + count, skip, out)
    for span in range(spans):
        k, added, misses, own_sums = _chunk(span, head, v, state, given, reads, layout)
        last = bound + span * COLUMNS == fold
        number = fold + tl.arange(0, COLUMNS)
        place = (slot * layout.ring + number % layout.ring) * layout.value_heads + head
        at_row = place[:, None] * layout.value_size + v
        real = (last & (number < start + count))[:, None] & there
        tl.store(ring_added + at_row, added, mask=real)
        if layout.corrects:
            tl.store(ring_misses + at_row, misses, mask=real)
        total = tl.sum(tl.where(tl.arange(0, COLUMNS) == COLUMNS - 1, own_sums, 0), 0)
        state = tl.where(last, state, folded(state, k, added, own_sums, total))
    tl.store(at_state, state, mask=there & (dim >= 0) & (fold != bound))


@triton.jit
def _chunk(span, head, v, state, given, reads, layout: tl.constexpr):
    """The rows of a chunk read -> their keys, what they add, their misses, and their sums of decays."""
    mixed, every, solved, weights, sums = given
    bound, start, end, skip, out = reads
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    row = tl.arange(0, COLUMNS)
    first = span * COLUMNS
    mixed += first * layout.inputs
    at_key = row[:, None] * layout.inputs + head // layout.group * layout.key_size
    at_key += tl.arange(0, layout.key_size)[None, :]
    at_value = row[:, None] * layout.inputs + head * layout.value_size
    at_value += 2 * layout.key_heads * layout.key_size
    q, k = tl.load(mixed + at_key), tl.load(mixed + layout.key_heads * layout.key_size + at_key)
    values = tl.load(mixed + at_value + v, mask=v < layout.value_size, other=0.0)
    beta = tl.load(every + (first + row) * (2 * layout.value_heads))
    first_square = span * (layout.value_heads * COLUMNS * COLUMNS)
    own_sums = tl.load(sums + span * (layout.value_heads * COLUMNS) + row)
    at_square = row[:, None] * COLUMNS + row[None, :]
    used = tl.load(weights + first_square + at_square)
    if layout.corrects:
        factors = tl.load(solved + first_square + at_square)
        misses = missed(values, beta, own_sums, rows_times(k, state, DTYPE))
        added = product(factors, misses).to(DTYPE)
    else:
        misses = values
        added = (beta[:, None] * values.to(tl.float32)).to(DTYPE)
    result = read(rows_times(q, state, DTYPE), layout.scale, own_sums)
    result = tl.dot(used, added, result, input_precision="ieee")
    if layout.skip:
        result += values.to(tl.float32) * skip
    number = bound + first + row
    real = ((number < end) & (number >= start))[:, None] & (v < layout.value_size)
    at_out = (first + row)[:, None] * (layout.value_heads * layout.value_size) + v
    tl.store(out + at_out, result.to(out.dtype.element_ty), mask=real)
    return k, added, misses, own_sums
