"""Weights of four bits as kernels read them: integers with a scale, and perhaps a zero point, per group.

GPTQ, AWQ, AutoRound and compressed-tensors differ in how they pack, and not in what that means: all become
`Int4Weight`. Rows stay as they are. A matrix that no kernel reads (columns in an order of their own, a
rank's share that cuts through groups, other sizes) is widened as it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from eyas.engine.checkpoint.packed import PackedConfig
from eyas.engine.checkpoint.packed_numbers import PackedNumbers
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.dense import DenseProjection, product
from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import ExpertWeight, GateActivation
from eyas.engine.kernels.products import exact_wide, int4, skinny
from eyas.engine.kernels.products.blocks import Rows, StoredWeight
from eyas.engine.kernels.products.rows import act_mul
from eyas.engine.kernels.products.skinny_tiles import MOST_STRETCHES

_BITS = 4


@dataclass(frozen=True)
class Int4Projection(Projection):
    """Products of few rows widen numbers in registers; those of many widen the matrix, and are cuBLAS's."""

    packed: int4.Int4Weight

    @property
    def shape(self) -> torch.Size:
        return self.packed.shape

    @property
    def weight(self) -> StoredWeight:
        """The whole matrix, widened at every call."""
        return StoredWeight(self.packed.widened())

    @property
    def matrix(self) -> int4.Int4Weight:
        return self.packed

    def folded(self, gain: torch.Tensor) -> torch.Tensor:
        return gain

    def apply(self, x: Rows, products: GroupedProducts, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        if x.shape[0] > skinny.MAX_ROWS and not products.launch.exact:
            return product(x, self.packed.widened(), bias)
        if x.shape[0] > skinny.MAX_ROWS:
            made = self._exact_product(x, products, "linear")
            return made if bias is None else made.add_(bias)
        made = skinny.empty_padded(x.shape[0], self.shape[0], like=x)
        skinny.linear(skinny.SkinnyInput(x), self.packed, made, products.launch)
        return made if bias is None else made.add_(bias)

    def gated(self, x: Rows, products: GroupedProducts, gate: GateActivation) -> Rows:
        assert isinstance(x, torch.Tensor)
        if x.shape[0] > skinny.MAX_ROWS and not products.launch.exact:
            return act_mul(product(x, self.packed.widened()), gate.gelu, products.launch.pdl)
        if x.shape[0] > skinny.MAX_ROWS:
            raw, ones = self._exact_product(x, products, "gated"), x.new_ones(x.shape[0], dtype=torch.float32)
            return exact_wide.act_mul(raw, ones, gate.gelu, products.launch.pdl)
        made = skinny.empty_padded(x.shape[0], self.shape[0] // 2, like=x)
        skinny.gated(skinny.SkinnyInput(x), self.packed, made, products.launch, gate.gelu)
        return made

    def exact_shares(self, x: Rows, products: GroupedProducts, kind: str, span: int) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return exact_wide.shares(x, self.packed.widened(), products.launch, kind, span)

    def _exact_product(self, x: torch.Tensor, products: GroupedProducts, kind: str) -> torch.Tensor:
        """By kernels of our own: cuBLAS has been tried for weights that are fused alone."""
        return exact_wide.product(x, self.packed.widened(), replace(products.launch, cublas=False), kind)

    def below(self, lower: Self) -> Self:
        return type(self)(self.packed.below(lower.packed))

    def in_order(self, rows: torch.Tensor) -> Self:
        return type(self)(self.packed.in_order(rows.to(self.packed.words.device)))

    @property
    def of_experts(self) -> ExpertWeight:
        return self.packed

    def room(self, count: int) -> Self:
        return type(self)(self.packed.room(count))

    def put(self, place: int, part: Self) -> None:
        self.packed.put(place, part.packed)


@dataclass(frozen=True)
class Int4Loader:
    """A `ProjectionLoader` of packed integers of four bits."""

    weights: WeightSource

    @classmethod
    def of(cls, weights: WeightSource, names: list[str]) -> Self | None:
        """None unless all of them are packed integers of four bits. Experts' columns must be in their order:
        what is widened is so for all of them alike.
        """
        config = weights.quantized
        if not isinstance(config, PackedConfig) or config.bits != _BITS or not config.integers:
            return None
        if not all(map(weights.is_packed, names)):
            return None
        if any(".experts." in name for name in names) and not cls._has_experts(config):
            return None
        return cls(weights)

    @staticmethod
    def _has_experts(config: PackedConfig) -> bool:
        """True if kernels of experts read the format."""
        return not getattr(config, "by_activations", False)

    def rows(self, names: list[str], rows: list[int], columns: int) -> Projection:
        parts = zip(names, rows, strict=True)
        return self._made([self.weights.take_packed(name, (count, columns), 0) for name, count in parts])

    def columns(self, name: str, shape: tuple[int, int]) -> Projection:
        return self._made([self.weights.take_packed(name, shape, 1)])

    def whole(self, name: str, shape: tuple[int, int]) -> Projection:
        return self._made([self.weights.take_packed(name, shape, None)])

    def _made(self, parts: list[PackedNumbers]) -> Projection:
        dtype = self.weights.placement.dtype
        parts = [_in_order(part) for part in parts]
        if not all(map(self._is_served, parts)):
            return DenseProjection(StoredWeight(torch.cat([part.widened().to(dtype) for part in parts])))
        stretch = self._stretch(parts[0].numbers.shape[1])
        packed = [int4.packed(part.numbers, part.zeros, part.scales, dtype, stretch) for part in parts]
        whole = packed[0]
        for lower in packed[1:]:
            whole = whole.below(lower)
        return Int4Projection(whole)

    def _stretch(self, k: int) -> int:
        """Columns that are of whole groups; 0: no matter."""
        return 0

    def _is_served(self, part: PackedNumbers) -> bool:
        """True if kernels have its sizes."""
        (n, k), groups = part.numbers.shape, part.scales.shape[1]
        return part.groups is None and n % 16 == 0 and int4.served(k, groups, self._stretch(k))


@dataclass(frozen=True)
class ExactInt4Loader(Int4Loader):
    """The same for the exact arithmetic, in which scales are of the model's type, as the widened numbers."""

    @staticmethod
    def _has_experts(config: PackedConfig) -> bool:
        return False

    def _made(self, parts: list[PackedNumbers]) -> Projection:
        dtype = self.weights.placement.dtype
        return super()._made([replace(part, scales=part.scales.to(dtype)) for part in parts])

    def _stretch(self, k: int) -> int:
        return k // MOST_STRETCHES


def _in_order(part: PackedNumbers) -> PackedNumbers:
    """Without `groups`, where they say that as many columns are in each, one after the other."""
    if part.groups is None or part.groups.is_meta:
        return part
    k, count = part.numbers.shape[1], part.scales.shape[1]
    plain = torch.arange(k, device=part.groups.device) // (k // count)
    return replace(part, groups=None) if k % count == 0 and torch.equal(plain, part.groups) else part
