"""Products of rows with the weight of the expert that each chose; with one expert, dense products.

Weights are of 16 or 32 bits, in FP8, or packed (`grouped_packed`). `product_kernel` computes them transposed,
weight rows on the matrix unit's long side, so that few rows waste nothing; weights come by the tensor memory
accelerator. FP8: 128 of k are multiplied at a time, and what they give is added in float32, since Hopper's
accumulators keep 14 bits; before that it is scaled, but for scales of weight rows, which wait for the sum. Of
a tile whose k is split the last program to arrive adds the parts up, in order. What need not be exact goes
elsewhere where that is faster: one row to `single`, a short k to `grouped_sweep`, tall blocks to
`grouped_wide`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from eyas.engine.kernels.experts import grouped_packed, grouped_sweep, grouped_wide
from eyas.engine.kernels.experts.group import ChoiceOrder, GroupedChoices, OneRow, OrderSizes, group
from eyas.engine.kernels.experts.grouped_kernels import product_kernel
from eyas.engine.kernels.experts.grouped_task import (
    ExpertWeight,
    GateActivation,
    GroupedTask,
    RowWalk,
    read_by,
    shape_of,
)
from eyas.engine.kernels.experts.grouped_tiles import (
    GroupedShape,
    GroupedTile,
    Table,
    exact_tile_for,
    lines_ahead,
    programs,
    steps_together,
    stretches_of,
    tile_for,
    tile_over,
)
from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.kernels.products import single
from eyas.engine.kernels.products.blocks import Rows, StoredWeight, count_of, squares_of
from eyas.engine.kernels.products.skinny import ProductLaunch


@dataclass(frozen=True)
class GroupedProducts:
    """The state that the products of one stream share: scratch memory, and tiles that were measured."""

    launch: ProductLaunch
    tiles: Table = field(default_factory=dict)
    vendor: bool = False  # whether `vendor` has products here

    def dense(self, x: Rows, weight: ExpertWeight) -> torch.Tensor:
        """x [m, k] . weight [n, k]^T -> [m, n]."""
        if isinstance(weight, StoredWeight) and self.is_single(x, weight):
            read = x if single.can_read(x, weight) else weight.read(x, self.launch.pdl)
            return single.dense(read, weight, self.launch.pdl)
        made = self._start(x, weight, RowWalk(), self._dense_tile(x, weight, None), None)
        assert isinstance(made, torch.Tensor)
        return made

    def dense_gated(self, x: Rows, weight: ExpertWeight, gate: GateActivation) -> Rows:
        """x [m, k], weight [2 width, k] -> act(gate) * up, [m, width]; rounded, if that is done at once."""
        if isinstance(weight, StoredWeight) and self.is_single(x, weight):
            read = weight.read(x, self.launch.pdl)
            return single.gated(read, weight, None, gate.gelu, self.launch.pdl)
        return self._start(x, weight, RowWalk(), self._dense_tile(x, weight, gate), gate)

    def is_single(self, x: Rows, weight: StoredWeight, together: int = 1) -> bool:
        """True if `single` makes the product of x with this weight, of `together` experts at once."""
        return count_of(x) == 1 and not self.launch.exact and single.can_hold(weight, together)

    def group(self, experts: torch.Tensor, weights: tuple[ExpertWeight, ExpertWeight]) -> GroupedChoices:
        """The order of experts int32 [m, per_row] for `gate_up` and `down` with these weights."""
        sizes = self.order_sizes(experts.numel(), weights)
        return group(experts, sizes.experts, sizes.rows, self.launch.pdl)

    def order_sizes(self, choices: int, weights: tuple[ExpertWeight, ExpertWeight]) -> OrderSizes:
        """How `group` cuts this number of choices into blocks."""
        gate_up = shape_of(weights[0], GateActivation())
        return OrderSizes(gate_up.experts, self._tile_for(gate_up, choices).rows)

    def walked(self, experts: torch.Tensor, weights: tuple[ExpertWeight, ExpertWeight]) -> ChoiceOrder:
        """The same, or the choices of one row as they are, where both kernels take them: those of packed
        weights, and the one that makes all products of exact arithmetic. None is -1 then.
        """
        kinds = {isinstance(weight, StoredWeight) for weight in weights}
        if len(experts) > 1 or len(kinds) > 1 or kinds == {True} and not self.launch.exact:
            return self.group(experts, weights)
        return OneRow(experts.view(-1), self.order_sizes(experts.numel(), weights).rows)

    @staticmethod
    def are_packed(weights: tuple[ExpertWeight, ExpertWeight]) -> bool:
        """True if `grouped_packed` makes both products."""
        return not any(isinstance(weight, StoredWeight) for weight in weights)

    def gate_up(
        self,
        x: Rows,
        weight: ExpertWeight,
        grouped: ChoiceOrder,
        per_row: int,
        gate: GateActivation,
        bias: torch.Tensor | None = None,
    ) -> Rows:
        """x [m, k], weight [experts, 2 width, k], bias [experts, 2 width] -> act(gate) * up, [choices, width]
        in their order; rounded, if that is done at once.
        """
        tile = self._tile(weight, grouped, gate)
        return self._start(x, weight, RowWalk(grouped, per_row), tile, gate, bias)

    def down(
        self, x: Rows, weight: ExpertWeight, grouped: ChoiceOrder, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The experts' down projection of `gate_up`'s result, weight [experts, hidden, width] and bias
        [experts, hidden] -> [choices, hidden], by choice.

        Choices that the order leaves out have rows that nothing wrote.
        """
        choose = exact_tile_for if self.launch.exact else tile_over
        tile = choose(shape_of(weight, None), grouped.count, self.tiles, grouped.rows)
        made = self._start(x, weight, RowWalk(grouped, scatter=True), tile, None, bias)
        assert isinstance(made, torch.Tensor)
        return made

    def down_task(
        self, x: Rows, weight: ExpertWeight, grouped: ChoiceOrder, bias: torch.Tensor | None = None
    ) -> GroupedTask:
        """The product that `down` makes, ready for a kernel that does more with it."""
        walk, tile = RowWalk(grouped, scatter=True), self._tile(weight, grouped, None)
        return GroupedTask(read_by(weight, x, self.launch.pdl), weight, walk, tile, None, bias)

    def each(self, x: Rows, weight: ExpertWeight, grouped: ChoiceOrder, per_row: int) -> torch.Tensor:
        """x [choices / per_row, k], weight [experts, n, k] -> [choices, n], by choice: rows by the weight of
        each of their experts, and nothing more.

        Choices that the order leaves out have rows that nothing wrote.
        """
        walk, tile = RowWalk(grouped, per_row, scatter=True), self._tile(weight, grouped, None)
        made = self._start(x, weight, walk, tile, None)
        assert isinstance(made, torch.Tensor)
        return made

    def _dense_tile(self, x: Rows, weight: ExpertWeight, gate: GateActivation | None) -> GroupedTile:
        return self._tile_for(shape_of(weight, gate), count_of(x))

    def _tile(self, weight: ExpertWeight, grouped: ChoiceOrder, gate: GateActivation | None) -> GroupedTile:
        """The tile of a product, with as many rows as the blocks have."""
        return self._tile_for(shape_of(weight, gate), grouped.count, grouped.rows)

    def _tile_for(self, shape: GroupedShape, choices: int, rows: int = 0) -> GroupedTile:
        choose = exact_tile_for if self.launch.exact else tile_for
        return choose(shape, choices, self.tiles, rows)

    def _start(
        self,
        x: Rows,
        weight: ExpertWeight,
        walk: RowWalk,
        tile: GroupedTile,
        gate: GateActivation | None,
        bias: torch.Tensor | None = None,
    ) -> Rows:
        task = GroupedTask(read_by(weight, x, self.launch.pdl), weight, walk, tile, gate, bias)
        if not isinstance(weight, StoredWeight):
            grouped_packed.start(task, self.launch)
        elif self.launch.exact:
            _start(task, self.launch)
        elif grouped_sweep.takes(task):
            grouped_sweep.start(task, self.launch)
        elif grouped_wide.takes(task):
            grouped_wide.start(task, self.launch)
        else:
            _start(task, self.launch)
        return task.out


def _start(task: GroupedTask, launch: ProductLaunch) -> None:
    """Computes `task.out`, weight rows on the matrix unit's long side."""
    shape, tile, walk, pdl = task.shape, task.tile, task.walk, launch.pdl
    squares, parts, eps = squares_of(task.read)
    together = steps_together(shape, tile)
    product_kernel[(min(task.most * task.tiles, programs(tile, shape)), tile.split)](
        *(*task.rows, squares, task.described, task.stored, task.scales, task.bias, *task.made, *task.order),
        *(launch.partials, launch.tickets, task.choices, task.most, eps),
        **task.constants(),
        **task.gated(),
        SPLIT=tile.split,
        FOLDS=stretches_of(shape) // tile.split if launch.exact else 1,
        PARTS=parts,
        PDL=pdl,
        LINES=lines_ahead(shape, tile) if pdl and (walk.grouped is None or walk.scatter) else 0,
        EXPERTS=shape.experts,
        TOGETHER=together,
        num_warps=tile.warps,
        num_stages=cdiv(tile.stages, together),
        launch_pdl=pdl,
        **({"enable_fp_fusion": False} if launch.exact else {}),
    )
