"""Layers whose key elements decay each by itself, Kimi Delta Attention's: one row after the other.

One kernel has prompts, single rows, chains and trees. A program has some value columns of a head, and walks
through a sequence's rows from its state's position on, those that the ring has among them; of a tree each
node walks its own path from the last certain row on. So a row's bits follow from the state and its path,
whatever rows are beside them. Nothing of rows is kept beside the slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.kernels.products.halving import halving_sum
from eyas.engine.kernels.states.mixing import convolved, normed, numbers_back
from eyas.engine.kernels.states.order import STEP, DeltaLayer, DeltaLayout
from eyas.engine.kernels.states.short import keep_inputs
from eyas.engine.states.rows import StateRows

_BLOCK = 32  # value columns of a program
_COLUMNS = 128  # gates that a program keeps


def recur_by_row(
    inputs: torch.Tensor,
    gates: torch.Tensor,
    layer: DeltaLayer,
    rows: StateRows,
    out: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Recurs over any number of rows, as `few.recur_few` does over few."""
    shape, stored, filters = layer.rule.shape, layer.stored, layer.rule.filters
    layout = DeltaLayout.of(layer, 1, _BLOCK, rows.trees, pdl)
    where = (rows.slots, rows.firsts, rows.counts, rows.starts, rows.bounds, rows.folds)
    (sequences,), launch = rows.slots.shape, {"num_warps": 8, "launch_pdl": pdl}
    _walk_rows[(shape.value_heads * layout.blocks, sequences)](
        *(inputs, inputs.stride(0), gates, filters, stored.inputs, stored.gates, stored.tails),
        *(stored.states, *where, rows.before, out, layout),
        **launch,
        enable_fp_fusion=False,
    )
    keep_inputs(inputs, shape, stored, rows, pdl)
    _keep_gates[(cdiv(shape.gates, _COLUMNS), sequences)](
        gates, stored.gates, *where, layout, shape.gates, _COLUMNS, **launch
    )


@kernel
def _walk_rows(
    inputs, stride, gates, filters, ring, ring_gates, tails, states,
    slots, firsts, counts, starts, bounds, folds, before, out, layout: tl.constexpr,
):  # fmt: skip
    """Grid (value heads * blocks, B)."""
    after_previous(layout.pdl)
    sequence = tl.program_id(1)
    head, block = tl.program_id(0) // layout.blocks, tl.program_id(0) % layout.blocks
    count = tl.load(counts + sequence)
    if count == 0:
        return
    slot, first = tl.load(slots + sequence).to(tl.int64), tl.load(firsts + sequence).to(tl.int64)
    start, bound, fold = tl.load(starts + sequence), tl.load(bounds + sequence), tl.load(folds + sequence)
    v = block * layout.block + tl.arange(0, layout.block)
    key = tl.arange(0, layout.key_size)
    at_state = states + slot * layout.state_stride + head * (layout.key_size * layout.value_size)
    at_state += key[None, :] * layout.value_size + v[:, None]
    there = v < layout.value_size
    state = tl.load(at_state, mask=there[:, None] & (bound > 0), other=0.0)
    rows = (
        inputs + first * stride, stride, filters, ring + slot * layout.input_stride,
        tails + slot * layout.tail_stride, bound, start, before + first,
    )  # fmt: skip
    GATES: tl.constexpr = layout.value_heads * (layout.key_size + 1)
    given = (gates + first * GATES, ring_gates + slot * layout.gate_stride, start)
    out += (first * layout.value_heads + head) * layout.value_size + v
    end = start if layout.tree else start + count
    for begin in range(bound, end, STEP):
        tile = _tile_of(head, v, there, begin, start + count, rows, given, layout)
        for r in range(tl.minimum(end - begin, STEP)):
            state = _followed(state, r, tile)
            if begin + r >= start:
                read = _read_by(state, r, tile, layout)
                at_row = out + (begin + r - start) * (layout.value_heads * layout.value_size)
                tl.store(at_row, read.to(out.dtype.element_ty), mask=there)
            if begin + r + 1 == fold:
                tl.store(at_state, state, mask=there[:, None] & (key >= 0)[None, :])
    if layout.tree:
        for node in range(count):
            path = _path_of(node, before + first, start)
            mine = state
            for begin in range(0, node + 1, STEP):
                tile = _tile_of(head, v, there, start + begin, start + count, rows, given, layout)
                for r in range(tl.minimum(node + 1 - begin, STEP)):
                    on = ((path >> (begin + r)) & 1) != 0
                    mine = tl.where(on, _followed(mine, r, tile), mine)
                    if begin + r == node:
                        read = _read_by(mine, r, tile, layout)
                        at_row = out + node * (layout.value_heads * layout.value_size)
                        tl.store(at_row, read.to(out.dtype.element_ty), mask=there)


@triton.jit
def _tile_of(head, v, there, begin, end, rows, given, layout: tl.constexpr):
    """`STEP` rows from `begin` on: queries, keys [STEP, key size], values [STEP, n], the shares of a state
    that are left [STEP, key size], and factors [STEP]; all float32.
    """
    inputs, stride, filters, ring, tails, bound, start, before = rows
    number = begin + tl.arange(0, STEP)
    real = number < end
    numbers = numbers_back(number, real, before, start, layout)
    key = tl.arange(0, layout.key_size)
    at_key = head // layout.group * layout.key_size + key
    at_value = 2 * layout.key_heads * layout.key_size + head * layout.value_size + v
    q = convolved(
        numbers, real, at_key, key >= 0, filters, filters, inputs, stride, start, start, ring, tails, bound,
        layout, True,
    )  # fmt: skip
    k = convolved(
        numbers, real, layout.key_heads * layout.key_size + at_key, key >= 0, filters, filters, inputs,
        stride, start, start, ring, tails, bound, layout, True,
    )  # fmt: skip
    values = convolved(
        numbers, real, at_value, there, filters, filters, inputs, stride, start, start, ring, tails, bound,
        layout, True,
    )  # fmt: skip
    new, old, _ = given
    GATES: tl.constexpr = layout.value_heads * (layout.key_size + 1)
    at_new, at_old = (number - start) * GATES, number % layout.ring * GATES
    of_key = (head * layout.key_size + key)[None, :]
    decay = tl.load(new + at_new[:, None] + of_key, mask=(real & (number >= start))[:, None], other=0.0)
    decay += tl.load(old + at_old[:, None] + of_key, mask=(number < start)[:, None], other=0.0)
    of_head = layout.value_heads * layout.key_size + head
    beta = tl.load(new + at_new + of_head, mask=real & (number >= start), other=0.0)
    beta += tl.load(old + at_old + of_head, mask=number < start, other=0.0)
    return normed(q) * layout.scale, normed(k), values, tl.exp(decay), beta


@triton.jit
def _row_of(x, r):
    """Row r of x [STEP, n]: all but one of what is added are zeros."""
    return tl.sum(tl.where((tl.arange(0, STEP) == r)[:, None], x, 0.0), 0)


@triton.jit
def _followed(state, r, tile):
    """The state [n, key size] behind row r of a tile."""
    q, k, values, kept, beta = tile
    key = _row_of(k, r)[None, :]
    state = state * _row_of(kept, r)[None, :]
    factor = tl.sum(tl.where(tl.arange(0, STEP) == r, beta, 0.0), 0)
    added = (_row_of(values, r) - halving_sum(state * key)) * factor
    return state + key * added[:, None]


@triton.jit
def _read_by(state, r, tile, layout: tl.constexpr):
    """What row r of a tile reads of the state behind it, [n]."""
    q, k, values, kept, beta = tile
    return halving_sum(state * _row_of(q, r)[None, :])


@triton.jit
def _path_of(node, before, start):
    """The rows of the step on a node's path, a bit for each."""
    path = tl.full((), 1, tl.int64) << node
    last = tl.load(before + node) - start
    while last >= 0:
        path = path | (tl.full((), 1, tl.int64) << last)
        last = tl.load(before + last) - start
    return path


@kernel
def _keep_gates(
    gates, ring_gates, slots, firsts, counts, starts, bounds, folds,
    layout: tl.constexpr, GATES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of columns, B): the ring gets the gates of rows that are not folded."""
    after_previous(layout.pdl)
    sequence = tl.program_id(1)
    slot, first = tl.load(slots + sequence).to(tl.int64), tl.load(firsts + sequence).to(tl.int64)
    start, count = tl.load(starts + sequence), tl.load(counts + sequence)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    begin = tl.maximum(start, tl.load(folds + sequence))
    for offset in range(begin, start + count, STEP):
        number = offset + tl.arange(0, STEP)
        real = (number < start + count)[:, None] & (column < GATES)
        x = tl.load(gates + (first + number - start)[:, None] * GATES + column, mask=real)
        at = ring_gates + slot * layout.gate_stride + (number % layout.ring)[:, None] * GATES + column
        tl.store(at, x, mask=real)
