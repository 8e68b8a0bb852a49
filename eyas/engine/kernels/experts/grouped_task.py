"""One product of `grouped`, ready for a kernel: rows, a weight, their tile, and room for what comes of them.

It launches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.kernels.experts.group import ChoiceOrder, OneRow
from eyas.engine.kernels.experts.grouped_tiles import GroupedShape, GroupedTile
from eyas.engine.kernels.products.blocks import SIDE, Rows, StoredWeight, count_of, parts_of, room_for
from eyas.engine.kernels.products.fp4 import Fp4Weight
from eyas.engine.kernels.products.int4 import Int4Weight
from eyas.engine.kernels.products.int8 import Int8Weight

ExpertWeight = StoredWeight | Fp4Weight | Int4Weight | Int8Weight
"""[experts, n, k]: numbers, or packed ones, which `grouped_packed` reads."""

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class RowWalk:
    """The order in which a product walks rows; without a group, x as it lies.

    The row of a choice is the choice over `per_row`, or (0) its place in the order; `scatter`: the result's
    row is the choice, else its place.
    """

    grouped: ChoiceOrder | None = None
    per_row: int = 0
    scatter: bool = False


@dataclass(frozen=True)
class GateActivation:
    """gelu: what the gate passes, in its tanh form; else SiLU. `rounding`: how the result will be read.
    `clamped`: as `clamped_swiglu` of `eyas.engine.layers.activations`, which products of experts alone have.
    """

    gelu: bool = False
    rounding: RowRounding | None = None
    clamped: bool = False

    def rounded_by(self, tile: GroupedTile) -> RowRounding | None:
        """The rounding, if a program of that tile has all that shares a scale."""
        here = self.rounding is not None and self.rounding.rows == "block" and tile.columns == SIDE
        return self.rounding if here else None


@dataclass(frozen=True)
class GroupedTask:
    """read: rows as the weight reads them. `bias`: [experts, n], if there is one."""

    read: Rows
    weight: ExpertWeight
    walk: RowWalk
    tile: GroupedTile
    gate: GateActivation | None
    bias: torch.Tensor | None = None

    @cached_property
    def shape(self) -> GroupedShape:
        """The shape of the weight."""
        return shape_of(self.weight, self.gate)

    @cached_property
    def choices(self) -> int:
        """Rows of the result."""
        grouped = self.walk.grouped
        return count_of(self.read) if grouped is None else grouped.count

    @cached_property
    def most(self) -> int:
        """Blocks of rows, at most."""
        grouped = self.walk.grouped
        return -(-self.choices // self.tile.rows) if grouped is None else grouped.most

    @cached_property
    def tiles(self) -> int:
        """Tiles of columns."""
        return -(-self.shape.outputs // self.tile.columns)

    @cached_property
    def out(self) -> Rows:
        """Room for the result: rounded, if a program has all that shares a scale."""
        like, _ = parts_of(self.read)
        plain = torch.empty(self.choices, self.shape.outputs, dtype=self.read.dtype, device=like.device)
        return plain if self._after is None else room_for(plain, self._after)

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The input: numbers, and their scales."""
        return parts_of(self.read)

    @property
    def made(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output: numbers, and their scales."""
        return parts_of(self.out)

    @property
    def stored(self) -> torch.Tensor:
        """The weight [all rows, k], unless it is packed."""
        assert isinstance(self.weight, StoredWeight)
        return self.weight.stored.view(-1, self.shape.k)

    @property
    def described(self) -> TensorDescriptor:
        """`stored`, by tiles."""
        flat = self.stored
        return TensorDescriptor(
            flat, list(flat.shape), [self.shape.k, 1], [self.tile.columns, self.tile.depth]
        )

    def placed(self, rows: int) -> TensorDescriptor:
        """The input's numbers, which lie as the order has them, by this number of rows."""
        numbers, _ = self.rows
        return TensorDescriptor(numbers, list(numbers.shape), [self.shape.k, 1], [rows, self.tile.depth])

    @property
    def scales(self) -> torch.Tensor | None:
        """The scales of the weight, unless it is packed."""
        assert isinstance(self.weight, StoredWeight)
        return self.weight.scales

    @property
    def order(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The order of choices, and its blocks; of one row, none and its experts."""
        grouped = self.walk.grouped
        if isinstance(grouped, OneRow):
            return None, grouped.chosen
        return (None, None) if grouped is None else (grouped.order, grouped.blocks)

    def constants(self) -> dict[str, Any]:
        """The compile-time constants of every kernel."""
        shape, tile, rounding = self.shape, self.tile, rounding_of(self.weight)
        return {
            "N": shape.n,
            "K": shape.k,
            "OUTPUTS": shape.outputs,
            "ROWS": tile.rows,
            "COLUMNS": tile.columns,
            "DEPTH": tile.depth,
            "GROUP": tile.group,
            "PER_ROW": self.walk.per_row,
            "SCATTER": self.walk.scatter,
            "BLOCKS": rounding is not None and rounding.rows == "block",
            "CHANNELS": rounding is not None and rounding.rows != "block",
            "MADE": _TYPES[self.read.dtype],
        }

    def gated(self) -> dict[str, bool]:
        """Further compile-time constants of kernels that may have a gate."""
        gate, after = self.gate, self._after
        return {
            "GATED": gate is not None,
            "GELU": gate is not None and gate.gelu,
            "CLAMPED": gate is not None and gate.clamped,
            "POWERS": after is not None and after.powers,
        }

    @cached_property
    def _after(self) -> RowRounding | None:
        return None if self.gate is None else self.gate.rounded_by(self.tile)


def shape_of(weight: ExpertWeight, gate: GateActivation | None) -> GroupedShape:
    """The weight's shape for `tile_for`."""
    n, k = weight.shape[-2:]
    experts = weight.shape[0] if len(weight.shape) == 3 else 1
    itemsize = weight.itemsize if isinstance(weight, StoredWeight) else 0
    return GroupedShape(experts, n, k, gate is not None, itemsize)


def rounding_of(weight: ExpertWeight) -> RowRounding | None:
    """How rows are rounded that meet the weight; None: not at all."""
    return weight.rounding if isinstance(weight, StoredWeight) else None


def read_by(weight: ExpertWeight, x: Rows, pdl: bool) -> Rows:
    """Rows [m, k] as products with this weight read them."""
    return weight.read(x, pdl) if isinstance(weight, StoredWeight) else x
