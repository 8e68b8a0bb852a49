"""Weights of packed numbers that kernels widen in registers, whatever their format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Self

import torch

from eyas.engine.checkpoint.packed_numbers import PackedNumbers
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.dense import DenseProjection, product
from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import ExpertWeight, GateActivation
from eyas.engine.kernels.products import exact_wide, skinny
from eyas.engine.kernels.products.blocks import Rows, StoredWeight
from eyas.engine.kernels.products.packed import PackedWeight
from eyas.engine.kernels.products.rows import act_mul


@dataclass(frozen=True)
class PackedProjection(Projection):
    """Any `PackedWeight`. Products of few rows widen numbers in registers; those of many are cuBLAS's, with
    the matrix `copy` [n, k] that was widened once, or without one widen it first.
    """

    packed: PackedWeight
    copy: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.packed.shape

    @property
    def weight(self) -> StoredWeight:
        return StoredWeight(self._wide)

    @property
    def matrix(self) -> PackedWeight:
        return self.packed

    @property
    def _wide(self) -> torch.Tensor:
        """The whole matrix."""
        return self.packed.widened() if self.copy is None else self.copy

    def apply(self, x: Rows, products: GroupedProducts, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        if x.shape[0] > skinny.MAX_ROWS and not products.launch.exact:
            return product(x, self._wide, bias)
        if x.shape[0] > skinny.MAX_ROWS:
            made = self._exact_product(x, products, "linear")
            return made if bias is None else made.add_(bias)
        made = skinny.empty_padded(x.shape[0], self.shape[0], like=x)
        skinny.linear(skinny.SkinnyInput(x), self.packed, made, products.launch)
        return made if bias is None else made.add_(bias)

    def gated(self, x: Rows, products: GroupedProducts, gate: GateActivation) -> Rows:
        assert isinstance(x, torch.Tensor)
        if x.shape[0] > skinny.MAX_ROWS and not products.launch.exact:
            return act_mul(product(x, self._wide), gate.gelu, products.launch.pdl)
        if x.shape[0] > skinny.MAX_ROWS:
            raw, ones = self._exact_product(x, products, "gated"), x.new_ones(x.shape[0], dtype=torch.float32)
            return exact_wide.act_mul(raw, ones, gate.gelu, products.launch.pdl)
        made = skinny.empty_padded(x.shape[0], self.shape[0] // 2, like=x)
        skinny.gated(skinny.SkinnyInput(x), self.packed, made, products.launch, gate.gelu)
        return made

    def exact_shares(self, x: Rows, products: GroupedProducts, kind: str, span: int) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return exact_wide.shares(x, self._wide, products.launch, kind, span)

    def _exact_product(self, x: torch.Tensor, products: GroupedProducts, kind: str) -> torch.Tensor:
        """The exact product by kernels of our own: cuBLAS has been tried only for fused weights."""
        return exact_wide.product(x, self._wide, replace(products.launch, cublas=False), kind)

    def below(self, lower: Self) -> Self:
        return self._like(self.packed.below(lower.packed))

    def in_order(self, rows: torch.Tensor) -> Self:
        return self._like(self.packed.in_order(rows.to(self.packed.words.device)))

    def _like(self, packed: PackedWeight) -> Self:
        """The projection of another matrix, with a widened copy if this one has one."""
        return type(self)(packed, None if self.copy is None else packed.widened())

    @property
    def of_experts(self) -> ExpertWeight:
        assert isinstance(self.packed, ExpertWeight)
        return self.packed

    def room(self, count: int) -> Self:
        return type(self)(self.packed.room(count))

    def put(self, place: int, part: Self) -> None:
        self.packed.put(place, part.packed)

    @property
    def stacks(self) -> list[torch.Tensor]:
        return self.packed.tensors


@dataclass(frozen=True)
class PackedLoader(ABC):
    """A `ProjectionLoader` of packed numbers of one format, once its `of` has taken them. `copies`: whether
    what it makes has a widened copy.
    """

    weights: WeightSource
    copies: bool = False

    def rows(self, names: list[str], rows: list[int], columns: int) -> Projection:
        parts = zip(names, rows, strict=True)
        return self._made([self.weights.take_packed(name, (count, columns), 0) for name, count in parts])

    def columns(self, name: str, shape: tuple[int, int]) -> Projection:
        return self._made([self.weights.take_packed(name, shape, 1)])

    def whole(self, name: str, shape: tuple[int, int]) -> Projection:
        return self._made([self.weights.take_packed(name, shape, None)])

    @abstractmethod
    def _made(self, parts: list[PackedNumbers]) -> Projection:
        """The projection of matrices, one below the other."""

    def _joined(self, parts: Sequence[PackedWeight]) -> PackedProjection:
        """Matrices of the format, one below the other."""
        packed = reduce(lambda upper, lower: upper.below(lower), parts)
        return PackedProjection(packed, packed.widened() if self.copies else None)

    def _widened(self, parts: list[PackedNumbers]) -> Projection:
        """The same, for what no kernel reads as it is."""
        dtype = self.weights.placement.dtype
        return DenseProjection(StoredWeight(torch.cat([part.widened().to(dtype) for part in parts])))


def in_order(part: PackedNumbers) -> PackedNumbers:
    """Without `groups`, where they say that as many columns are in each, one after the other."""
    if part.groups is None or part.groups.is_meta:
        return part
    k, count = part.numbers.shape[1], part.scales.shape[1]
    plain = torch.arange(k, device=part.groups.device) // (k // count)
    return replace(part, groups=None) if k % count == 0 and torch.equal(plain, part.groups) else part
