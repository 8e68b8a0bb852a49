"""Weights in FP8 as they are stored: e4m3 with scales for blocks, rows or whole tensors.

The rows that they multiply are rounded to FP8 as the checkpoint says. What is stored so but multiplies rows
as they are is no such format: it is widened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.checkpoint.quantized import FP8_SIDE
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import Projection, StoredProjection
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import GateActivation
from eyas.engine.kernels.products import few, vendor
from eyas.engine.kernels.products.blocks import Fp8Rows, Rows, StoredWeight, count_of
from eyas.engine.kernels.products.rows import act_mul, act_mul_rounded


class Fp8Projection(StoredProjection):
    """Products of many rows are the vendor's where it has them, those of a few wait in registers (`few`)."""

    matrix = None

    def apply(self, x: Rows, products: GroupedProducts, bias: torch.Tensor | None = None) -> torch.Tensor:
        made = self._product(x, products)
        return made if bias is None else made.add_(bias)

    def gated(self, x: Rows, products: GroupedProducts, gate: GateActivation) -> Rows:
        if not self._is_vendors(x, products):
            return products.dense_gated(x, self.weight, gate)
        made, pdl = vendor.product(self._read(x, products), self.weight), products.launch.pdl
        if gate.rounding is not None and gate.rounding.rows == "block":
            return act_mul_rounded(made, gate.rounding, gate.gelu, pdl)
        return act_mul(made, gate.gelu, pdl)

    def exact_shares(self, x: Rows, products: GroupedProducts, kind: str, span: int) -> torch.Tensor:
        return products.dense(x, self.weight)

    def below(self, lower: Projection) -> Self:
        scales = torch.cat((self._scales, _scales_of(lower)))
        return self._with(torch.cat((self.weight.stored, lower.weight.stored)), scales)

    def in_order(self, rows: torch.Tensor) -> Self:
        assert self.rounding is not None
        rows = rows.to(self.weight.stored.device)
        stored = self.weight.stored.view(torch.uint8)[rows].view(self.weight.stored.dtype)
        return self._with(stored, self._scales if self.rounding.rows == "block" else self._scales[rows])

    def room(self, count: int) -> Self:
        stored, scales = (each.new_empty(count, *each.shape) for each in (self.weight.stored, self._scales))
        return type(self)(StoredWeight(stored, scales, self.rounding))

    def put(self, place: int, part: Projection) -> None:
        self.weight.stored[place].copy_(part.weight.stored)
        self._scales[place].copy_(_scales_of(part))

    @property
    def _scales(self) -> torch.Tensor:
        return _scales_of(self)

    def _with(self, stored: torch.Tensor, scales: torch.Tensor) -> Self:
        return type(self)(StoredWeight(stored, scales, self.rounding))

    def _product(self, x: Rows, products: GroupedProducts) -> torch.Tensor:
        if self._is_vendors(x, products):
            return vendor.product(self._read(x, products), self.weight)
        if products.launch.exact or products.is_single(x, self.weight):
            return products.dense(x, self.weight)
        if few.takes(count_of(x), self.weight):
            return few.dense(self._read(x, products), self.weight, products.launch.pdl)
        return products.dense(x, self.weight)

    def _is_vendors(self, x: Rows, products: GroupedProducts) -> bool:
        there = products.vendor and not products.launch.exact
        return there and vendor.takes(count_of(x), x.dtype, self.weight)

    def _read(self, x: Rows, products: GroupedProducts) -> Fp8Rows:
        read = self.weight.read(x, products.launch.pdl)
        assert isinstance(read, Fp8Rows)
        return read


@dataclass(frozen=True)
class Fp8Loader:
    """A `ProjectionLoader`. `rounding`: of the rows that all of its weights multiply."""

    weights: WeightSource
    rounding: RowRounding

    @classmethod
    def of(cls, weights: WeightSource, names: list[str]) -> Self | None:
        """None unless all of them are in FP8, and multiply rows in FP8."""
        rounding = weights.rounding(names)
        return None if rounding is None else cls(weights, rounding)

    def rows(self, names: list[str], rows: list[int], columns: int) -> Fp8Projection:
        for name, count in zip(names, rows, strict=True):
            self._check(name, "rows", count)
        parts = [self.weights.take_stored(n, (r, columns), 0) for n, r in zip(names, rows, strict=True)]
        stored, scales = zip(*parts, strict=True)
        return self._made(torch.cat(stored), torch.cat(scales))

    def columns(self, name: str, shape: tuple[int, int]) -> Fp8Projection:
        if self.weights.placement.ranks > 1:
            self._check(name, "columns", shape[1])
        return self._made(*self.weights.take_stored(name, shape, 1))

    def whole(self, name: str, shape: tuple[int, int]) -> Fp8Projection:
        return self._made(*self.weights.take_stored(name, shape, None))

    def _made(self, stored: torch.Tensor, scales: torch.Tensor) -> Fp8Projection:
        return Fp8Projection(StoredWeight(stored, scales, self.rounding))

    def _check(self, name: str, what: str, count: int) -> None:
        ranks = self.weights.placement.ranks
        if self.rounding.rows == "block" and count % (ranks * FP8_SIDE):
            blocks = f"{count} {what} in FP8 blocks of {FP8_SIDE}"
            raise ConfigError(f"tensor {name}: {blocks} cannot be divided by {ranks} ranks")


def _scales_of(part: Projection) -> torch.Tensor:
    assert part.weight.scales is not None
    return part.weight.scales
