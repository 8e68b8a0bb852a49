"""Products of experts of packed numbers, for any number of rows: they are widened in registers.

What an expert's few rows wait for is its weight. So weight rows lie on the matrix unit's long side and come
by the tensor memory accelerator, packed; a gate's rows and those of up share a tile. One row alone needs no
order of choices: each is a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from eyas.engine.kernels.experts.group import OneRow
from eyas.engine.kernels.experts.grouped_kernels import rows_at, total_of, where
from eyas.engine.kernels.experts.grouped_task import GroupedTask, RowWalk
from eyas.engine.kernels.experts.row_choice import RowChoice, choice_at
from eyas.engine.kernels.launch.launching import call_ahead, kernel
from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.kernels.products import fp4, int4, int8
from eyas.engine.kernels.products.activation import passed, with_bias
from eyas.engine.kernels.products.blocks import StoredWeight
from eyas.engine.kernels.products.fp4 import Fp4Weight
from eyas.engine.kernels.products.packed import PackedWeight
from eyas.engine.kernels.products.skinny import ProductLaunch

DENSE, SINGLE, GROUPED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Walks: rows as they lie, by one expert; the choices of one row; blocks of an order."""

_LINE = 128  # bytes
MOST_AHEAD, AHEAD_BYTES = 16, 18 << 20
"""Steps whose words a program prefetches into L2 while it waits, and what all programs of a product prefetch,
at most: what L2 does not keep until it is read comes twice, and the product before waits for it.
"""


@dataclass(frozen=True)
class PackedPlan:
    """A kernel's compile-time parameters. `columns`: weight rows of a tile, a gate's and up's together.
    `parts`, `unit`, `size`: of a step of the weight. `scaled`: columns that have one scale behind the
    product; 0: scales are in the numbers of an `Fp4Weight`. `choice`: how one row chooses, if programs find
    that out.
    """

    n: int
    k: int
    outputs: int
    rows: int
    columns: int
    parts: int
    unit: int
    size: int
    scaled: int
    deep: int
    split: int
    group: int
    walk: int
    per_row: int
    scatter: bool
    gated: bool
    gelu: bool
    clamped: bool
    experts: int
    ahead: int
    pdl: bool
    choice: RowChoice | None = None

    @property
    def half(self) -> int:
        """Columns of the result that a tile makes."""
        return self.columns // 2 if self.gated else self.columns

    @property
    def tiles(self) -> int:
        """Tiles of columns."""
        return cdiv(self.outputs, self.half)

    @property
    def step(self) -> int:
        """Columns of a step."""
        return self.parts * self.unit

    @property
    def by_steps(self) -> bool:
        """Whether words lie step by step, as those of experts do."""
        return bool(self.walk != DENSE.value)

    @property
    def together(self) -> int:
        """Weight rows whose words of a step are one line."""
        return max(_LINE // (self.unit * self.size), 1)

    @property
    def steps(self) -> int:
        """Steps of a row of the weight."""
        return cdiv(self.k, self.step)

    @property
    def chunk(self) -> int:
        """Steps of a program, `deep` at a time; of the last one some may lie beyond the row."""
        return cdiv(self.steps, self.split * self.deep) * self.deep

    @property
    def stored(self) -> int:
        """Words of a row."""
        return self.steps * self.unit


def start(task: GroupedTask, launch: ProductLaunch) -> None:
    """Computes `task.out`."""
    weight, plan, tile = task.weight, plan_of(task, launch.pdl), task.tile
    assert not isinstance(weight, StoredWeight)
    blocks = blocks_of(weight, plan)
    _packed[(task.most * plan.tiles, plan.split)](
        *(
            task.rows[0],
            weight.words,
            blocks,
            weight.scales,
            weight.beside,
            task.bias,
            task.made[0],
            *task.order,
        ),
        *(launch.partials, launch.tickets, task.choices, task.most),
        plan,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=plan.pdl,
    )


def blocks_of(weight: PackedWeight, plan: PackedPlan) -> TensorDescriptor:
    """The words of a weight, by tiles and steps."""
    halves = 2 if plan.gated else 1
    if plan.by_steps:
        parts = weight.words.view(plan.experts, plan.steps, halves, plan.outputs, plan.unit)
    else:
        parts = weight.words.view(1, halves, plan.outputs, plan.stored)
    block = [*[1] * (parts.dim() - 3), halves, plan.half, plan.unit]
    return TensorDescriptor(parts, list(parts.shape), list(parts.stride()), block)


def plan_of(task: GroupedTask, pdl: bool) -> PackedPlan:
    """The plan of a product."""
    shape, tile, walk, gate, weight = task.shape, task.tile, task.walk, task.gate, task.weight
    assert not isinstance(weight, StoredWeight)
    step, scaled = weight.step, 0 if isinstance(weight, Fp4Weight) else weight.together
    known = walk.scatter and tile.rows <= 32
    choice = walk.grouped.choice if isinstance(walk.grouped, OneRow) else None
    tiles = task.most * cdiv(shape.outputs * (2 if gate else 1), tile.columns)
    room = AHEAD_BYTES // (tiles * tile.split * tile.columns * step.unit * step.size)
    ahead = _ahead(min(cdiv(shape.k, step.columns * tile.split), room)) if pdl and known else 0
    return PackedPlan(
        n=shape.n,
        k=shape.k,
        outputs=shape.outputs,
        rows=tile.rows,
        columns=tile.columns,
        parts=step.parts,
        unit=step.unit,
        size=step.size,
        scaled=scaled,
        deep=max(tile.depth // step.columns, 1),
        split=tile.split,
        group=tile.group,
        walk=_walk(walk).value,
        per_row=walk.per_row,
        scatter=walk.scatter,
        gated=gate is not None,
        gelu=gate is not None and gate.gelu,
        clamped=gate is not None and gate.clamped,
        experts=shape.experts,
        ahead=ahead,
        pdl=pdl,
        choice=choice,
    )


def _ahead(steps: int) -> int:
    """The number of a program's steps that it prefetches, a power of two, of as many as it might."""
    return min(1 << steps.bit_length() >> 1, MOST_AHEAD)


def _walk(walk: RowWalk) -> tl.constexpr:
    if walk.grouped is None:
        return DENSE
    return SINGLE if isinstance(walk.grouped, OneRow) else GROUPED


@kernel(do_not_specialize=["choices", "most"])
def _packed(
    x,
    words,
    tiles,
    scales,
    beside,
    bias,
    out,
    order,
    blocks,
    partials,
    tickets,
    choices,
    most,
    plan: tl.constexpr,
):
    """Grid (blocks * tiles of columns, split): a tile of one block of rows, or a part of its k."""
    if plan.pdl:
        if plan.ahead > 0:
            _call_ahead(words, blocks, most, plan)
        gdc_wait()
        gdc_launch_dependents()  # not before: so `down` knows the order of the experts when it calls ahead
    cell, count = tl.program_id(0), most
    if plan.walk == GROUPED:
        count = tl.load(blocks + 3 * most)
    if cell >= count * plan.tiles:
        return
    block, tile = where(cell, count, plan.tiles, plan.group)
    expert, begin, end = _block_at(blocks, block, choices, most, plan)
    inside, source, target = rows_at(order, begin, end, plan.rows, plan.per_row, plan.scatter)
    first = tile * plan.half
    part = tl.program_id(1)
    made = product_of(x, tiles, scales, beside, source, inside, expert, first, part, plan)
    last = True
    if plan.split > 1:
        rows, columns = tl.arange(0, plan.rows), tl.arange(0, plan.columns)
        if plan.walk == SINGLE:  # the other rows are none
            row = tl.sum(tl.where(inside[None, :], made, 0.0), 1)
            row, last = _finished(row, columns, plan.columns, partials, tickets, cell, plan)
            made = tl.broadcast_to(row[:, None], (plan.columns, plan.rows))
        else:
            place = columns[:, None] * plan.rows + rows[None, :]
            made, last = _finished(made, place, plan.columns * plan.rows, partials, tickets, cell, plan)
    column = first + tl.arange(0, plan.half)
    there = column < plan.outputs
    a, b = made, made
    if plan.gated:
        both = tl.permute(tl.reshape(made, (2, plan.half, plan.rows)), (1, 2, 0))
        a, b = tl.split(both)
    if bias is not None:
        at = (expert * plan.n + column)[:, None]
        a, b = with_bias(a, b, bias, at, there[:, None], plan.outputs, plan.gated)
    if plan.gated:
        a = passed(a, b, plan.gelu, plan.clamped)
    spot = target.to(tl.int64)[:, None] * plan.outputs + column[None, :]
    stored = inside[:, None] & there[None, :] & last
    tl.store(out + spot, tl.trans(a).to(out.dtype.element_ty), mask=stored)


@triton.jit
def _block_at(blocks, block, choices, most, plan: tl.constexpr):
    """A block's expert, and where its choices begin and end."""
    expert, begin, end = 0, block * plan.rows, tl.minimum((block + 1) * plan.rows, choices)
    if plan.walk == SINGLE:
        begin, end = block, block + 1
        CHOICE: tl.constexpr = plan.choice
        if CHOICE is None:
            expert = tl.load(blocks + block)
        else:
            expert, _ = choice_at(blocks, block, CHOICE)
    elif plan.walk == GROUPED:
        expert = tl.load(blocks + block)
        begin, end = tl.load(blocks + most + block), tl.load(blocks + 2 * most + block)
    return expert, begin, end


@triton.jit
def _call_ahead(words, blocks, most, plan: tl.constexpr):
    """The first steps of this program's tile.

    What `blocks` says may be old, or anything: it must lead to a weight that exists, and is read past L1
    (volatile), which must not keep it until it is read again after the wait.
    """
    count, cell, expert = most, tl.program_id(0), 0
    if plan.walk == GROUPED:
        count = tl.minimum(tl.maximum(tl.load(blocks + 3 * most, volatile=True), 1), most)
    block, tile = where(cell % (count * plan.tiles), count, plan.tiles, plan.group)
    if plan.walk != DENSE:
        expert = tl.minimum(tl.maximum(tl.load(blocks + block, volatile=True), 0), plan.experts - 1)
    call_steps_ahead(words, expert, tile * plan.half, tl.program_id(1), plan)


@triton.jit
def call_steps_ahead(words, expert, first, part, plan: tl.constexpr):
    """The lines of the first steps of a tile in a part of k."""
    pair = tl.arange(0, plan.columns // plan.together) * plan.together
    row = tl.minimum(first + pair % plan.half, plan.outputs - 1) + pair // plan.half * plan.outputs
    step = tl.minimum(part * plan.chunk + tl.arange(0, plan.ahead), plan.steps - 1)
    lines = ((expert * plan.steps + step).to(tl.int64) * plan.n)[None, :] + row[:, None]
    call_ahead(words + lines * plan.unit)


@triton.jit
def product_of(x, tiles, scales, beside, source, inside, expert, first, part, plan: tl.constexpr):
    """A part of k of weight . rows^T, float32 [columns, rows]."""
    pair = tl.arange(0, plan.columns)
    column = first + pair % plan.half
    there = column < plan.outputs
    column += pair // plan.half * plan.outputs
    start = part * plan.chunk
    acc = tl.full((plan.columns, plan.rows), 0.0, tl.float32)
    DEEP: tl.constexpr = plan.deep
    for from_step in range(start, start + plan.chunk, DEEP):
        for more in tl.static_range(DEEP):
            step = from_step + more  # a row's last may lie beyond it: nothing is there, and counts as zeros
            if plan.by_steps:
                tile = tiles.load([expert, step, 0, first, 0]).reshape(plan.columns, plan.unit)
            else:
                tile = tiles.load([0, 0, first, step * plan.unit]).reshape(plan.columns, plan.unit)
            if plan.scaled == 0:
                of_step = scales + (expert * plan.steps + step) * plan.n + column
                four = tl.load(of_step, mask=there & (step < plan.steps), other=0)
                values = _values(x, source, inside, step * plan.step, plan.step, plan)
                numbers = fp4.parts_of(tile, four, 0, 4, x.dtype.element_ty)
                acc = tl.dot(numbers, values.T, acc, input_precision="ieee")
            else:
                acc = _in_groups(
                    acc, x, tile, scales, beside, source, inside, expert, column, there, step, plan
                )
    if plan.scaled == 0 and beside is not None:
        acc *= tl.load(beside + expert * plan.n + column, mask=there, other=0.0)[:, None]
    return acc


@triton.jit
def _in_groups(
    acc, x, tile, scales, beside, source, inside, expert, column, there, step, plan: tl.constexpr
):  # fmt: skip
    """The sum with a step of whole numbers, whose groups are scaled in float32."""
    SCALED: tl.constexpr = plan.scaled
    GROUPED: tl.constexpr = SCALED // plan.unit
    GROUPS: tl.constexpr = plan.parts // GROUPED
    for group in tl.static_range(GROUPS):
        at = step * plan.step + group * SCALED
        place = (expert * (plan.k // SCALED) + at // SCALED) * plan.n + column
        known = there & (at < plan.k)
        scale = tl.load(scales + place, mask=known, other=0.0).to(tl.float32)
        zero = None
        if beside is not None:
            zero = tl.load(beside + place, mask=known, other=0.0)
        values = _values(x, source, inside, at, SCALED, plan)
        if plan.parts == 1:
            numbers = int8.numbers_of(tile, zero, x.dtype.element_ty)
        else:
            if zero is None:
                zero = int4.eights(column, x.dtype.element_ty)
            numbers = int4.parts_of(tile, zero, None, group * GROUPED, GROUPED)
        acc += tl.dot(numbers, values.T, input_precision="ieee") * scale[:, None]
    return acc


@triton.jit
def _values(x, source, inside, at, COUNT: tl.constexpr, plan: tl.constexpr):
    """COUNT columns of the rows, from `at` on; zeros where there are none."""
    column = at + tl.arange(0, COUNT)
    mask = inside[:, None] & (column < plan.k)[None, :]
    return tl.load(x + source[:, None] * plan.k + column[None, :], mask=mask, other=0.0)


@triton.jit
def _finished(made, place, SIZE: tl.constexpr, partials, tickets, cell, plan: tl.constexpr):
    """The sum of all programs' parts of a tile, in order, for the last one to arrive; and whether it is.
    `place`: of each number among SIZE.
    """
    shares = partials + cell * (plan.split * SIZE) + place
    tl.store(shares + tl.program_id(1) * SIZE, made)
    tl.debug_barrier()  # one thread takes the ticket, for the stores of all
    last = tl.atomic_add(tickets + cell, 1, sem="acq_rel") == plan.split - 1
    tl.store(tickets + cell, 0, mask=last)
    if last:
        made, _ = total_of(shares, plan.split, SIZE, 0, False)
    return made, last
