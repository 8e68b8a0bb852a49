"""Products of rows with the weight of the expert that each chose; with one expert, dense products.

One kernel, for weights of 16 and 32 bits and in FP8, for one row and for thousands. It is computed
transposed, weight rows on the matrix unit's long side, so that few rows waste nothing; weights come by the
tensor memory accelerator. FP8: 128 of k are multiplied at a time, and what they give is added in float32,
since Hopper's accumulators keep 14 bits; before that it is scaled, but for scales of weight rows, which wait
for the sum. Of a tile whose k is split the last program to arrive adds the parts up, in order. It knows
`group.Grouped`, tiles and weights, and neither routers nor models.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from eyas.engine.checkpoint.fp8 import Rounding
from eyas.engine.kernels import single
from eyas.engine.kernels.activation import steepness
from eyas.engine.kernels.blocks import SIDE, Fp8Rows, Fp8Weight, quantise, quantised, room_for, rounding_of
from eyas.engine.kernels.group import Grouped, group
from eyas.engine.kernels.grouped_tiles import (
    SHORT,
    Shape,
    Table,
    Tile,
    exact_tile_for,
    lines_ahead,
    programs,
    stretches_of,
    tile_for,
)
from eyas.engine.kernels.launching import call_ahead
from eyas.engine.kernels.skinny import Launch

Weight = torch.Tensor | Fp8Weight
"""[n, k], or [experts, n, k]."""

Rows = torch.Tensor | Fp8Rows
"""[m, k]; what is not rounded to FP8 yet is, where the weight is in FP8."""

MOST_STEPS = tl.constexpr(SHORT)
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class Walk:
    """How a product walks rows; without a group, x as it lies.

    The row of a choice is the choice over `per_row`, or (0) its place in the order; `scatter`: the result's
    row is the choice, else its place.
    """

    grouped: Grouped | None = None
    per_row: int = 0
    scatter: bool = False


@dataclass(frozen=True)
class Gate:
    """gelu: what the gate passes, in its tanh form; else SiLU. `rounding`: how the result will be read."""

    gelu: bool = False
    rounding: Rounding | None = None

    def rounded_by(self, tile: Tile) -> Rounding | None:
        """The rounding, if a program of that tile has all that shares a scale."""
        here = self.rounding is not None and self.rounding.rows == "block" and tile.columns == SIDE
        return self.rounding if here else None


@dataclass(frozen=True)
class Products:
    """What the products of one stream share: scratch memory, and tiles that were measured."""

    launch: Launch
    tiles: Table = field(default_factory=dict)

    def read(self, x: Rows, weight: Weight) -> Rows:
        """Rows as products with this weight read them: for several that read the same."""
        if isinstance(x, torch.Tensor) and isinstance(weight, Fp8Weight):
            return quantise(x, weight.rounding, self.launch.pdl)
        return x

    def dense(self, x: Rows, weight: Weight) -> torch.Tensor:
        """x [m, k] . weight [n, k]^T -> [m, n]."""
        if self.has_one_row(x, weight):
            read = x if single.reads(x, weight) else self.read(x, weight)
            return single.dense(read, weight, self.launch.pdl)
        made = self._start(x, weight, Walk(), self._dense_tile(x, weight, None), None)
        assert isinstance(made, torch.Tensor)
        return made

    def dense_gated(self, x: Rows, weight: Weight, gate: Gate) -> Rows:
        """x [m, k], weight [2 width, k] -> act(gate) * up, [m, width]; rounded, if that is done at once."""
        if self.has_one_row(x, weight):
            return single.gated(self.read(x, weight), weight, None, gate.gelu, self.launch.pdl)
        return self._start(x, weight, Walk(), self._dense_tile(x, weight, gate), gate)

    def has_one_row(self, x: Rows, *weights: Weight, together: int = 1) -> bool:
        """Whether `single` takes the products of x with these weights, of `together` experts at once."""
        held = all(single.holds(weight, together) for weight in weights)
        return single.count_of(x) == 1 and not self.launch.exact and held

    def group(self, experts: torch.Tensor, weights: tuple[Weight, Weight]) -> Grouped:
        """The order of experts int32 [m, per_row] for `gate_up` and `down` with these weights."""
        gate_up = shape_of(weights[0], Gate())
        rows = self._tile_for(gate_up, experts.numel()).rows
        return group(experts, gate_up.experts, rows, self.launch.pdl)

    def gate_up(self, x: Rows, weight: Weight, grouped: Grouped, per_row: int, gate: Gate) -> Rows:
        """x [m, k], weight [experts, 2 width, k] -> act(gate) * up, [choices, width] in their order; rounded,
        if that is done at once.
        """
        tile = self._tile(weight, grouped, gate)
        return self._start(x, weight, Walk(grouped, per_row), tile, gate)

    def down(self, x: Rows, weight: Weight, grouped: Grouped) -> torch.Tensor:
        """What `gate_up` gave, weight [experts, hidden, width] -> [choices, hidden], by choice.

        Choices that the order leaves out have rows that nothing wrote.
        """
        made = self._start(x, weight, Walk(grouped, scatter=True), self._tile(weight, grouped, None), None)
        assert isinstance(made, torch.Tensor)
        return made

    def _dense_tile(self, x: Rows, weight: Weight, gate: Gate | None) -> Tile:
        return self._tile_for(shape_of(weight, gate), single.count_of(x))

    def _tile(self, weight: Weight, grouped: Grouped, gate: Gate | None) -> Tile:
        """Its rows are those of the blocks."""
        return self._tile_for(shape_of(weight, gate), grouped.order.shape[0], grouped.rows)

    def _tile_for(self, shape: Shape, choices: int, rows: int = 0) -> Tile:
        choose = exact_tile_for if self.launch.exact else tile_for
        return choose(shape, choices, self.tiles, rows)

    def _start(self, x: Rows, weight: Weight, walk: Walk, tile: Tile, gate: Gate | None) -> Rows:
        shape, launch, pdl = shape_of(weight, gate), self.launch, self.launch.pdl
        grouped, rounding = walk.grouped, rounding_of(weight)
        choices = single.count_of(x)
        if grouped is not None:
            choices = grouped.order.shape[0]
        read = self.read(x, weight)
        rows = read.stored if isinstance(read, Fp8Rows) else read
        scales = read.scales if isinstance(read, Fp8Rows) else None
        plain = torch.empty(choices, shape.outputs, dtype=read.dtype, device=rows.device)
        after = None if gate is None else gate.rounded_by(tile)
        out: Rows = plain if after is None else room_for(plain, after)
        stored = weight.stored if isinstance(weight, Fp8Weight) else weight
        flat = stored.view(-1, shape.k)
        most = triton.cdiv(choices, tile.rows) if grouped is None else grouped.most
        tiles = triton.cdiv(shape.outputs, tile.columns)
        _product[(min(most * tiles, programs(tile, shape)), tile.split)](
            *(
                rows,
                scales,
                TensorDescriptor(flat, list(flat.shape), [shape.k, 1], [tile.columns, tile.depth]),
                flat,
            ),
            weight.scales if isinstance(weight, Fp8Weight) else None,
            *((out.stored, out.scales) if isinstance(out, Fp8Rows) else (out, None)),
            *(None if grouped is None else grouped.order, None if grouped is None else grouped.blocks),
            *(launch.partials, launch.tickets, choices, most),
            N=shape.n,
            K=shape.k,
            OUTPUTS=shape.outputs,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            SPLIT=tile.split,
            FOLDS=stretches_of(shape) // tile.split if launch.exact else 1,
            GROUP=tile.group,
            PER_ROW=walk.per_row,
            SCATTER=walk.scatter,
            GATED=gate is not None,
            GELU=gate is not None and gate.gelu,
            BLOCKS=rounding is not None and rounding.rows == "block",
            CHANNELS=rounding is not None and rounding.rows != "block",
            POWERS=after is not None and after.powers,
            MADE=_TYPES[read.dtype],
            PDL=pdl,
            LINES=lines_ahead(shape, tile) if pdl and (grouped is None or walk.scatter) else 0,
            EXPERTS=shape.experts,
            num_warps=tile.warps,
            num_stages=tile.stages,
            launch_pdl=pdl,
            **({"enable_fp_fusion": False} if launch.exact else {}),
        )
        return out


def shape_of(weight: Weight, gate: Gate | None) -> Shape:
    """For `tile_for`."""
    n, k = weight.shape[-2:]
    experts = weight.shape[0] if len(weight.shape) == 3 else 1
    itemsize = 1 if isinstance(weight, Fp8Weight) else weight.element_size()
    return Shape(experts, n, k, gate is not None, itemsize)


@triton.jit(do_not_specialize=["choices", "most"])
def _product(
    x, x_scales, weights, stored, scales, out, out_scales, order, blocks, partials, tickets, choices, most,
    N: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SPLIT: tl.constexpr, FOLDS: tl.constexpr, GROUP: tl.constexpr,
    PER_ROW: tl.constexpr, SCATTER: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    BLOCKS: tl.constexpr, CHANNELS: tl.constexpr, POWERS: tl.constexpr, MADE: tl.constexpr,
    PDL: tl.constexpr, LINES: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """One tile after the other; blocks that are absent cost nothing."""
    TILES: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    if PDL:
        if LINES > 0:
            _call_ahead(
                stored, blocks, choices, most,
                N, K, OUTPUTS, ROWS, COLUMNS, SPLIT, GROUP, GATED, LINES, EXPERTS,
            )  # fmt: skip
        gdc_wait()
        gdc_launch_dependents()  # not before: so `down` knows the order of the experts when it calls ahead
    if blocks is None:
        count = (choices + ROWS - 1) // ROWS
    else:
        count = tl.load(blocks + 3 * most)
    for cell in range(tl.program_id(0), count * TILES, tl.num_programs(0)):
        _one_tile(
            x, x_scales, weights, scales, out, out_scales, order, blocks, partials, tickets, choices, most,
            cell, count, N, K, OUTPUTS, ROWS, COLUMNS, DEPTH, SPLIT, FOLDS, GROUP, PER_ROW, SCATTER, GATED,
            GELU, BLOCKS, CHANNELS, POWERS, MADE,
        )  # fmt: skip


@triton.jit
def _call_ahead(
    stored, blocks, choices, most,
    N: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr, LINES: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The first lines of the weight rows that this program reads first.

    What `blocks` says may be old, or anything: it must lead to a weight that exists, and is read past L1
    (volatile), which must not keep it until it is read again after the wait.
    """
    EACH: tl.constexpr = 128 // (stored.dtype.element_ty.primitive_bitwidth // 8)
    TILES: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    cell = tl.program_id(0)
    expert = 0
    if blocks is None:
        _, tile = _where(cell, (choices + ROWS - 1) // ROWS, TILES, GROUP)
    else:
        count = tl.minimum(tl.maximum(tl.load(blocks + 3 * most, volatile=True), 1), most)
        block, tile = _where(cell % (count * TILES), count, TILES, GROUP)
        expert = tl.minimum(tl.maximum(tl.load(blocks + block, volatile=True), 0), EXPERTS - 1)
    row = tl.minimum(tile * COLUMNS + tl.arange(0, COLUMNS), OUTPUTS - 1)
    at = tl.program_id(1) * (K // SPLIT) + tl.minimum(tl.arange(0, LINES) * EACH, K // SPLIT - 1)
    lines = stored + (expert * N + row).to(tl.int64)[:, None] * K + at[None, :]
    call_ahead(lines)
    if GATED:
        call_ahead(lines + OUTPUTS * K)


@triton.jit
def _one_tile(
    x, x_scales, weights, scales, out, out_scales, order, blocks, partials, tickets, choices, most,
    cell, count,
    N: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SPLIT: tl.constexpr, FOLDS: tl.constexpr, GROUP: tl.constexpr,
    PER_ROW: tl.constexpr, SCATTER: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    BLOCKS: tl.constexpr, CHANNELS: tl.constexpr, POWERS: tl.constexpr, MADE: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the result of one block of rows, or a part of its k."""
    block, tile = _where(cell, count, (OUTPUTS + COLUMNS - 1) // COLUMNS, GROUP)
    if blocks is None:
        expert, begin = 0, block * ROWS
        end = tl.minimum(begin + ROWS, choices)
    else:
        expert = tl.load(blocks + block)
        begin, end = tl.load(blocks + most + block), tl.load(blocks + 2 * most + block)
    place = begin + tl.arange(0, ROWS)
    inside = place < end
    source, target = place, place
    if order is not None:
        choice = tl.load(order + place, mask=inside, other=0)
        if PER_ROW > 0:
            source = choice // PER_ROW
        if SCATTER:
            target = choice
    source = tl.where(inside, source, 0).to(tl.int64)
    first = tile * COLUMNS
    a, b = _folded(
        x, x_scales, weights, scales, source, expert, first,
        N, K, OUTPUTS, ROWS, COLUMNS, DEPTH, SPLIT, FOLDS, GATED, BLOCKS, CHANNELS,
    )  # fmt: skip
    last = True
    if SPLIT > 1:
        size: tl.constexpr = COLUMNS * ROWS * (2 if GATED else 1)
        shares = partials + cell * (SPLIT * size)
        shares += tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(shares + tl.program_id(1) * size, a)
        if GATED:
            tl.store(shares + tl.program_id(1) * size + COLUMNS * ROWS, b)
        tl.debug_barrier()  # one thread takes the ticket, for the stores of all
        last = tl.atomic_add(tickets + cell, 1, sem="acq_rel") == SPLIT - 1
        tl.store(tickets + cell, 0, mask=last)
        if last:
            a, b = _total(shares, SPLIT, size, COLUMNS * ROWS, GATED)
    if CHANNELS:
        channel = first + tl.arange(0, COLUMNS)
        scales += expert * N + channel
        a *= tl.load(scales, mask=channel < OUTPUTS, other=0.0)[:, None]
        if GATED:
            b *= tl.load(scales + OUTPUTS, mask=channel < OUTPUTS, other=0.0)[:, None]
    if GATED:
        a = a * b / (1.0 + tl.exp(-steepness(a, GELU)))
    column, target = first + tl.arange(0, COLUMNS), target.to(tl.int64)
    there = column[None, :] < OUTPUTS
    kept, spot = inside[:, None] & there & last, target[:, None] * OUTPUTS + column[None, :]
    made = tl.trans(a).to(MADE)
    if out_scales is not None:
        made, scale = quantised(tl.where(there, made, 0.0), POWERS)
        tl.store(out_scales + target * ((OUTPUTS + 127) // 128) + tile, scale, mask=inside & last)
    tl.store(out + spot, made, mask=kept)


@triton.jit
def _folded(
    x, x_scales, weights, scales, source, expert, first,
    N: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SPLIT: tl.constexpr, FOLDS: tl.constexpr, GATED: tl.constexpr,
    BLOCKS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """This program's part of weight . rows^T: FOLDS stretches of k, each on its own, then their sum."""
    stretch = tl.program_id(1) * FOLDS
    a, b = _stretch(
        x, x_scales, weights, scales, source, expert, first, stretch,
        N, K, OUTPUTS, ROWS, COLUMNS, DEPTH, SPLIT * FOLDS, GATED, BLOCKS, CHANNELS,
    )  # fmt: skip
    for other in tl.static_range(1, FOLDS):
        more_a, more_b = _stretch(
            x, x_scales, weights, scales, source, expert, first, stretch + other,
            N, K, OUTPUTS, ROWS, COLUMNS, DEPTH, SPLIT * FOLDS, GATED, BLOCKS, CHANNELS,
        )  # fmt: skip
        a += more_a
        b += more_b
    return a, b


@triton.jit
def _stretch(
    x, x_scales, weights, scales, source, expert, first, stretch,
    N: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, STRETCHES: tl.constexpr, GATED: tl.constexpr, BLOCKS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """A stretch of k of weight . rows^T, float32 [COLUMNS, ROWS]; gated, of both halves' columns."""
    part: tl.constexpr = K // STRETCHES if STRETCHES > 1 else K
    start = stretch * part
    width: tl.constexpr = (K + 127) // 128
    if BLOCKS:
        scales += (expert * ((N + 127) // 128) + first // 128) * width
    whole = None
    if CHANNELS:
        whole = tl.load(x_scales + source)
    row = expert * N + first
    a = tl.zeros((COLUMNS, ROWS), tl.float32)
    b = tl.zeros((COLUMNS, ROWS), tl.float32)
    if part <= MOST_STEPS * DEPTH:
        # Without a loop of its own the loop over tiles is the innermost: the next one's loads are under way.
        for step in tl.static_range((part + DEPTH - 1) // DEPTH):
            a, b = _step(
                a, b, x, x_scales, weights, scales, source, row, start + step * DEPTH, whole,
                K, OUTPUTS, DEPTH, GATED, BLOCKS, CHANNELS,
            )  # fmt: skip
    else:
        for at in range(start, start + part, DEPTH):
            a, b = _step(
                a, b, x, x_scales, weights, scales, source, row, at, whole,
                K, OUTPUTS, DEPTH, GATED, BLOCKS, CHANNELS,
            )  # fmt: skip
    return a, b


@triton.jit
def _step(
    a, b, x, x_scales, weights, scales, source, row, at, whole,
    K: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, GATED: tl.constexpr, BLOCKS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """The sums with DEPTH more of k. `whole`: scales of whole rows."""
    width: tl.constexpr = (K + 127) // 128
    column = at + tl.arange(0, DEPTH)
    if K % DEPTH == 0:
        values = tl.load(x + source[:, None] * K + column[None, :])
    else:
        values = tl.load(x + source[:, None] * K + column[None, :], mask=column[None, :] < K, other=0.0)
    if BLOCKS:
        each = tl.load(x_scales + source * width + at // 128)
        scale = tl.load(scales + at // 128)
        a += tl.dot(weights.load([row, at]), values.T) * (each * scale)[None, :]
        if GATED:
            scale = tl.load(scales + OUTPUTS // 128 * width + at // 128)
            b += tl.dot(weights.load([row + OUTPUTS, at]), values.T) * (each * scale)[None, :]
    elif CHANNELS:
        # Scaled here and not at the end: a bare sum would stay in the accumulators.
        a += tl.dot(weights.load([row, at]), values.T) * whole[None, :]
        if GATED:
            b += tl.dot(weights.load([row + OUTPUTS, at]), values.T) * whole[None, :]
    else:
        a = tl.dot(weights.load([row, at]), values.T, a, input_precision="ieee")
        if GATED:
            b = tl.dot(weights.load([row + OUTPUTS, at]), values.T, b, input_precision="ieee")
    return a, b


@triton.jit
def _total(shares, SPLIT: tl.constexpr, SIZE: tl.constexpr, SECOND: tl.constexpr, GATED: tl.constexpr):
    """The sums of all parts, in order; past L1, which knows nothing of other SMs' stores."""
    a = tl.zeros(shares.shape, tl.float32)
    b = tl.zeros(shares.shape, tl.float32)
    for other in tl.static_range(SPLIT):
        a += tl.load(shares + other * SIZE, cache_modifier=".cg")
        if GATED:
            b += tl.load(shares + other * SIZE + SECOND, cache_modifier=".cg")
    return a, b


@triton.jit
def _where(cell, count, TILES: tl.constexpr, GROUP: tl.constexpr):
    """A cell's block of rows and its tile of columns: GROUP blocks share columns before the next."""
    first = cell // (GROUP * TILES) * GROUP
    here = tl.minimum(count - first, GROUP)
    within = cell % (GROUP * TILES)
    return first + within % here, within // here
