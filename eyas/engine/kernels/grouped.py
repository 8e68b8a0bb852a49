"""Products of rows with the weight of the expert that each chose; with one expert, dense products.

One kernel, for weights of 16 and 32 bits and in FP8, for a few rows and for thousands; one alone meets its
weights in `single`, if it need not be exact. It is computed transposed, weight rows on the matrix unit's long
side, so that few rows waste nothing; weights come by the tensor memory accelerator. FP8: 128 of k are
multiplied at a time, and what they give is added in float32, since Hopper's accumulators keep 14 bits; before
that it is scaled, but for scales of weight rows, which wait for the sum. Of a tile whose k is split the last
program to arrive adds the parts up, in order. It knows `group.Grouped`, tiles and weights, and neither
routers nor models.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from eyas.engine.checkpoint.fp8 import Rounding
from eyas.engine.kernels import single
from eyas.engine.kernels.blocks import SIDE, Fp8Rows, Fp8Weight, quantise, room_for, rounding_of
from eyas.engine.kernels.group import Grouped, group
from eyas.engine.kernels.grouped_kernels import product_kernel
from eyas.engine.kernels.grouped_tiles import (
    Shape,
    Table,
    Tile,
    exact_tile_for,
    lines_ahead,
    programs,
    stretches_of,
    tile_for,
)
from eyas.engine.kernels.skinny import Launch

Weight = torch.Tensor | Fp8Weight
"""[n, k], or [experts, n, k]."""

Rows = torch.Tensor | Fp8Rows
"""[m, k]; what is not rounded to FP8 yet is, where the weight is in FP8."""

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
        if self.is_single(x, weight):
            read = x if single.can_read(x, weight) else self.read(x, weight)
            return single.dense(read, weight, self.launch.pdl)
        made = self._start(x, weight, Walk(), self._dense_tile(x, weight, None), None)
        assert isinstance(made, torch.Tensor)
        return made

    def dense_gated(self, x: Rows, weight: Weight, gate: Gate) -> Rows:
        """x [m, k], weight [2 width, k] -> act(gate) * up, [m, width]; rounded, if that is done at once."""
        if self.is_single(x, weight):
            return single.gated(self.read(x, weight), weight, None, gate.gelu, self.launch.pdl)
        return self._start(x, weight, Walk(), self._dense_tile(x, weight, gate), gate)

    def is_single(self, x: Rows, weight: Weight, together: int = 1) -> bool:
        """Whether `single` makes the product of x with this weight, of `together` experts at once."""
        return single.count_of(x) == 1 and not self.launch.exact and single.can_hold(weight, together)

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
        product_kernel[(min(most * tiles, programs(tile, shape)), tile.split)](
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
