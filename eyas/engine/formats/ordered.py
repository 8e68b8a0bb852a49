"""Packed weights whose columns are in groups in an order of their own: GPTQ's `desc_act`, `actorder` group.

Columns are put into the order of their groups as a weight is loaded, and rows are put into the same one
before a product: so kernels read whole groups. A sum over columns has the same parts, in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from eyas.engine.checkpoint.packed_numbers import PackedNumbers
from eyas.engine.formats.dense import DenseProjection
from eyas.engine.formats.packed import PackedProjection
from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import GateActivation
from eyas.engine.kernels.products.blocks import Rows, StoredWeight


@dataclass(frozen=True)
class OrderedProjection(Projection):
    """`packed`: the matrix, its columns in the order `order`, int64 [k]. Nothing is fused into its products,
    whose rows stand in memory.
    """

    packed: PackedProjection
    order: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.packed.shape

    @property
    def weight(self) -> StoredWeight:
        """The whole matrix, widened at every call, its columns in their own order."""
        return StoredWeight(self.packed.weight.stored[:, self.order.argsort()])

    @property
    def matrix(self) -> None:
        return None

    def apply(self, x: Rows, products: GroupedProducts, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.packed.apply(self._in_order(x), products, bias)

    def gated(self, x: Rows, products: GroupedProducts, gate: GateActivation) -> Rows:
        return self.packed.gated(self._in_order(x), products, gate)

    def exact_shares(self, x: Rows, products: GroupedProducts, kind: str, span: int) -> torch.Tensor:
        raise TypeError("exact products have columns in their own order")

    def below(self, lower: Any) -> Any:
        """Widened, if the columns of the other one are in another order."""
        if isinstance(lower, OrderedProjection) and _alike(self.order, lower.order):
            return replace(self, packed=self.packed.below(lower.packed))
        return DenseProjection(self.weight).below(lower)

    def in_order(self, rows: torch.Tensor) -> OrderedProjection:
        return replace(self, packed=self.packed.in_order(rows))

    def room(self, count: int) -> OrderedProjection:
        raise TypeError("experts have columns in their own order")

    def put(self, place: int, part: Any) -> None:
        raise TypeError("experts have columns in their own order")

    def _in_order(self, x: Rows) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return x.index_select(1, self.order)


def ordered(packed: PackedProjection, order: torch.Tensor | None) -> Projection:
    """A packed matrix whose columns `by_groups` has put into an order, if it has."""
    return packed if order is None else OrderedProjection(packed, order)


def by_groups(parts: Sequence[PackedNumbers]) -> tuple[list[PackedNumbers], torch.Tensor | None]:
    """Matrices that the same rows meet, with columns in the order of their groups, and that order, int64 [k].
    None: they stay as they are, since each is in order, or groups differ in size or between matrices.
    """
    first = parts[0].groups
    if first is None or any(part.groups is None or not _alike(first, part.groups) for part in parts):
        return list(parts), None
    k, count = parts[0].numbers.shape[1], parts[0].scales.shape[1]
    order = first.argsort(stable=True)
    if k % count or any(part.scales.shape[1] != count for part in parts):
        return list(parts), None
    if not _alike(first[order], torch.arange(k, device=first.device) // (k // count)):
        return list(parts), None
    return [replace(part, numbers=part.numbers[:, order], groups=None) for part in parts], order


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True of tensors without values."""
    return one.is_meta or torch.equal(one, other)
