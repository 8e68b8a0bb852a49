"""A convolution along a row's path, without a state behind it: what a layer of a `ConvolutionShape` computes.

Two kernels. The first convolves, the oldest tap first, as the specification adds up; the second keeps the
rows from where the sequence's tail must stand, and moves the tail there. All is of single elements, so a row
has the bits of the specification, whatever group it comes in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.states.convolution import ShortConvolution
from eyas.engine.states.rows import StateGroups, StateRows
from eyas.engine.states.shape import DeltaShape
from eyas.engine.states.store import LayerStates

_ROWS, _COLUMNS = 16, 128  # of a program, at most


@dataclass(frozen=True)
class ShortLayout:
    """The kernels' compile-time parameters: a program has `rows` rows and `block` columns. `tree`: the row
    before a row on its path need not be the last one. Strides are those of slots.
    """

    columns: int
    kernel: int
    ring: int
    rows: int
    block: int
    tree: bool
    pdl: bool
    tail_stride: int
    input_stride: int

    @classmethod
    def of(cls, shape: DeltaShape, stored: LayerStates, rows: StateRows, pdl: bool) -> ShortLayout:
        """The layout of a layer's slots, for these rows."""
        return cls(
            *(shape.inputs, shape.kernel, stored.inputs.shape[1], min(_ROWS, power_of_2(rows.most))),
            block=min(_COLUMNS, power_of_2(shape.inputs)),
            tree=rows.trees,
            pdl=pdl,
            tail_stride=stored.tails.stride(0),
            input_stride=stored.inputs.stride(0),
        )


def convolve(
    inputs: torch.Tensor,
    rule: ShortConvolution,
    stored: LayerStates,
    groups: StateGroups,
    pdl: bool = False,
) -> torch.Tensor:
    """The convolved rows, [m, columns], of the inputs' dtype; zeros in rows that no sequence has.

    inputs [m, columns], rows of any stride: of the rows of every group.
    """
    out = inputs.new_zeros(inputs.shape)
    for rows in (groups.rounds, groups.singles, groups.chunks):
        if rows is not None:
            _of_group(inputs, rule, stored, rows, out, pdl)
    return out


def _of_group(
    inputs: torch.Tensor,
    rule: ShortConvolution,
    stored: LayerStates,
    rows: StateRows,
    out: torch.Tensor,
    pdl: bool,
) -> None:
    layout, (sequences,) = ShortLayout.of(rule.shape, stored, rows, pdl), rows.slots.shape
    grid = (cdiv(layout.columns, layout.block), sequences, cdiv(rows.most, layout.rows))
    where = (rows.slots, rows.firsts, rows.counts, rows.starts, rows.bounds, rows.folds)
    _convolve[grid](
        *(inputs, inputs.stride(0), stored.inputs, stored.tails, *where, rule.filters, rows.before, out),
        layout,
        num_warps=4,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    keep_inputs(inputs, rule.shape, stored, rows, pdl)


def keep_inputs(
    inputs: torch.Tensor, shape: DeltaShape, stored: LayerStates, rows: StateRows, pdl: bool = False
) -> None:
    """Keeps the convolution's inputs [m, shape.inputs] of rows that are not folded, and moves the tail to
    where the state must stand.
    """
    layout, (sequences,) = ShortLayout.of(shape, stored, rows, pdl), rows.slots.shape
    where = (rows.slots, rows.firsts, rows.counts, rows.starts, rows.bounds, rows.folds)
    _keep[(cdiv(layout.columns, layout.block), sequences)](
        *(inputs, inputs.stride(0), stored.inputs, stored.tails, *where, layout),
        num_warps=4,
        launch_pdl=pdl,
    )


@triton.jit
def _inputs_at(number, real, column, first, start, stood, given, layout: tl.constexpr):
    """The inputs of rows `number` [n] in columns [n, c]: of the forward, whose first row of the sequence is
    `first`, of the slot's ring below `start`, and of its tail below `stood`.
    """
    inputs, stride, ring, tails = given
    number, real = number[:, None], real[:, None]
    x = tl.load(inputs + (first + number - start) * stride + column, mask=real & (number >= start), other=0.0)
    kept = real & (number < start) & (number >= stood)
    x += tl.load(ring + number % layout.ring * layout.columns + column, mask=kept, other=0.0)
    old = real & (number < stood) & (stood > 0)
    at = tails + (number - stood + layout.kernel - 1) * layout.columns
    return x + tl.load(at + column, mask=old, other=0.0)  # one of the three is not zero


@kernel
def _convolve(
    inputs, stride, ring, tails, slots, firsts, counts, starts, bounds, folds, filters, before, out,
    layout: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of columns, B, tiles of rows)."""
    after_previous(layout.pdl)
    sequence = tl.program_id(1)
    row = tl.program_id(2) * layout.rows + tl.arange(0, layout.rows)
    count = tl.load(counts + sequence)
    if tl.program_id(2) * layout.rows >= count:
        return
    slot, first = tl.load(slots + sequence).to(tl.int64), tl.load(firsts + sequence).to(tl.int64)
    start, stood = tl.load(starts + sequence), tl.load(bounds + sequence)
    column = (tl.program_id(0) * layout.block + tl.arange(0, layout.block))[None, :]
    there, real = column < layout.columns, row < count
    given = (inputs, stride, ring + slot * layout.input_stride, tails + slot * layout.tail_stride)
    KERNEL: tl.constexpr = layout.kernel
    acc = tl.full((layout.rows, layout.block), 0.0, tl.float32)
    for tap in tl.static_range(KERNEL):
        number = start + row
        for _ in tl.static_range(KERNEL - 1 - tap):
            if layout.tree:
                inside = real & (number >= start)
                known = tl.load(before + first + number - start, mask=inside, other=0)
                number = tl.where(inside, known, number - 1)
            else:
                number = number - 1
        x = _inputs_at(number, real, tl.where(there, column, 0), first, start, stood, given, layout)
        factor = tl.load(filters + tap * layout.columns + column, mask=there, other=0.0)
        acc = acc + x.to(tl.float32) * factor
    at = out + (first + row)[:, None] * layout.columns + column
    tl.store(at, acc.to(out.dtype.element_ty), mask=real[:, None] & there)


@kernel
def _keep(
    inputs, stride, ring, tails, slots, firsts, counts, starts, bounds, folds, layout: tl.constexpr
):  # fmt: skip
    """Grid (blocks of columns, B)."""
    after_previous(layout.pdl)
    sequence = tl.program_id(1)
    count = tl.load(counts + sequence)
    if count == 0:
        return
    slot, first = tl.load(slots + sequence).to(tl.int64), tl.load(firsts + sequence).to(tl.int64)
    start, stood, fold = (
        tl.load(starts + sequence), tl.load(bounds + sequence), tl.load(folds + sequence)
    )  # fmt: skip
    column = (tl.program_id(0) * layout.block + tl.arange(0, layout.block))[None, :]
    there = column < layout.columns
    column = tl.where(there, column, 0)
    given = (inputs, stride, ring + slot * layout.input_stride, tails + slot * layout.tail_stride)
    if fold != stood:  # of rows that stay where they are: a ring has more places than rows from the fold on
        tap = tl.arange(0, triton.next_power_of_2(layout.kernel))
        real = tap < layout.kernel - 1
        x = _inputs_at(fold - layout.kernel + 1 + tap, real, column, first, start, stood, given, layout)
        tl.store(given[3] + tap[:, None] * layout.columns + column, x, mask=real[:, None] & there)
    begin = tl.maximum(start, fold)
    for offset in range(0, start + count - begin, layout.rows):
        number = begin + offset + tl.arange(0, layout.rows)
        real = (number < start + count)[:, None] & there
        x = tl.load(inputs + (first + number - start)[:, None] * stride + column, mask=real, other=0.0)
        tl.store(given[2] + (number % layout.ring)[:, None] * layout.columns + column, x, mask=real)
