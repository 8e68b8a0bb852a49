"""Weights of the model's own type: 16 or 32 bits for each number, and nothing beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import Projection, StoredProjection
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import GateActivation
from eyas.engine.kernels.products import exact_wide, skinny
from eyas.engine.kernels.products.blocks import Rows, StoredWeight
from eyas.engine.kernels.products.rows import act_mul


class DenseProjection(StoredProjection):
    """Products are cuBLAS's; those in exact arithmetic, and gates of few rows, are tiles of our own."""

    @property
    def matrix(self) -> torch.Tensor:
        return self.weight.stored

    def folded(self, gain: torch.Tensor) -> None:
        self.matrix.mul_(gain)

    def apply(self, x: Rows, products: GroupedProducts, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        if products.launch.exact:
            made = products.dense(x, self.weight)
            return made if bias is None else made.add_(bias)
        return product(x, self.matrix, bias)

    def gated(self, x: Rows, products: GroupedProducts, gate: GateActivation) -> Rows:
        assert isinstance(x, torch.Tensor)
        if products.launch.exact or x.shape[0] <= skinny.MAX_ROWS:
            return products.dense_gated(x, self.weight, gate)
        return act_mul(product(x, self.matrix), gate.gelu, products.launch.pdl)

    def exact_shares(self, x: Rows, products: GroupedProducts, kind: str, span: int) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return exact_wide.shares(x, self.matrix, products.launch, kind, span)

    def below(self, lower: Projection) -> Self:
        return type(self)(StoredWeight(torch.cat((self.matrix, lower.weight.stored))))

    def in_order(self, rows: torch.Tensor) -> Self:
        return type(self)(StoredWeight(self.matrix[rows.to(self.matrix.device)]))

    def room(self, count: int) -> Self:
        return type(self)(StoredWeight(self.matrix.new_empty(count, *self.shape)))

    def put(self, place: int, part: Projection) -> None:
        self.matrix[place].copy_(part.weight.stored)


@dataclass(frozen=True)
class DenseLoader:
    """A `ProjectionLoader`. What is stored in another format is widened as it is read."""

    weights: WeightSource

    @classmethod
    def of(cls, weights: WeightSource, names: list[str]) -> Self:
        """The loader, for any tensors."""
        return cls(weights)

    def rows(self, names: list[str], rows: list[int], columns: int) -> DenseProjection:
        """This rank's rows of several matrices, stacked."""
        return _dense(self.weights.stack_rows(names, rows, columns))

    def columns(self, name: str, shape: tuple[int, int]) -> DenseProjection:
        """This rank's columns of a matrix."""
        return _dense(self.weights.take_columns(name, shape))

    def whole(self, name: str, shape: tuple[int, int]) -> DenseProjection:
        """A whole matrix."""
        return _dense(self.weights.take(name, shape))


def product(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [m, k], matrix [n, k], bias [n] -> x . matrix^T + bias [m, n], for any number of rows."""
    return torch.mm(x, matrix.t()) if bias is None else torch.addmm(bias, x, matrix.t())


def _dense(matrix: torch.Tensor) -> DenseProjection:
    return DenseProjection(StoredWeight(matrix))
