"""Weights in MXFP4 and NVFP4 as kernels read them: numbers in e2m1, of which 32 or 16 have one scale.

Writers store them in different orders; all become `Fp4Weight`. A matrix that no kernel reads (a rank's share
that cuts through groups, sides of no multiple of 16) is widened as it is loaded, for all experts of a layer
alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.fp4 import Fp4Matrices, Mxfp4Experts
from eyas.engine.checkpoint.packed_numbers import PackedNumbers
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.dense import DenseProjection
from eyas.engine.formats.packed import PackedLoader
from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import ExpertWeight, GateActivation
from eyas.engine.kernels.products import fp4
from eyas.engine.kernels.products.blocks import Rows, StoredWeight

_SIDE = 16  # of what a weight's rows are a multiple
_ONE = 127  # the exponent of 1.0, as float32 has it


@dataclass(frozen=True)
class Fp4Projection(Projection):
    """A matrix of an expert, or those of all."""

    packed: fp4.Fp4Weight

    @property
    def shape(self) -> torch.Size:
        return self.packed.shape

    @property
    def weight(self) -> StoredWeight:
        raise TypeError("only experts have packed numbers of floating point")

    @property
    def of_experts(self) -> ExpertWeight:
        return self.packed

    @property
    def matrix(self) -> None:
        return None

    def apply(self, x: Rows, products: GroupedProducts, bias: torch.Tensor | None = None) -> torch.Tensor:
        made = products.dense(x, self.packed)
        return made if bias is None else made.add_(bias)

    def gated(self, x: Rows, products: GroupedProducts, gate: GateActivation) -> Rows:
        return products.dense_gated(x, self.packed, gate)

    def exact_shares(self, x: Rows, products: GroupedProducts, kind: str, span: int) -> torch.Tensor:
        raise TypeError("packed numbers of floating point have no exact products")

    def below(self, lower: Self) -> Self:
        return type(self)(self.packed.below(lower.packed))

    def in_order(self, rows: torch.Tensor) -> Self:
        return type(self)(self.packed.in_order(rows.to(self.packed.words.device)))

    def room(self, count: int) -> Self:
        return type(self)(self.packed.room(count))

    def put(self, place: int, part: Self) -> None:
        self.packed.put(place, part.packed)

    @property
    def stacks(self) -> list[torch.Tensor]:
        return self.packed.tensors


@dataclass(frozen=True)
class Fp4Loader:
    """A `ProjectionLoader` of experts in MXFP4 or NVFP4."""

    weights: WeightSource

    @classmethod
    def of(cls, weights: WeightSource, names: list[str]) -> Self | None:
        """None unless all of them are, and are experts'."""
        if not isinstance(weights.quantized, Mxfp4Experts | Fp4Matrices):
            return None
        return cls(weights) if all(".experts." in n and weights.is_packed(n) for n in names) else None

    def rows(self, names: list[str], rows: list[int], columns: int) -> Projection:
        shapes = [(count, columns) for count in rows]
        return self._made(
            names, [self.weights.take_packed(*each, 0) for each in zip(names, shapes, strict=True)]
        )

    def columns(self, name: str, shape: tuple[int, int]) -> Projection:
        return self._made([name], [self.weights.take_packed(name, shape, 1)])

    def whole(self, name: str, shape: tuple[int, int]) -> Projection:
        return self._made([name], [self.weights.take_packed(name, shape, None)])

    def _made(self, names: list[str], parts: list[PackedNumbers]) -> Projection:
        dtype = self.weights.placement.dtype
        if any(part.groups is not None or len(part.numbers) % _SIDE for part in parts):
            return DenseProjection(StoredWeight(torch.cat([part.widened().to(dtype) for part in parts])))
        whole, *others = (_packed(*each, dtype) for each in zip(names, parts, strict=True))
        for lower in others:
            whole = whole.below(lower)
        return Fp4Projection(whole)


@dataclass(frozen=True)
class DenseFp4Loader(PackedLoader):
    """A `ProjectionLoader` of matrices in MXFP4 or NVFP4 that are not experts'."""

    @classmethod
    def of(cls, weights: WeightSource, names: list[str]) -> Self | None:
        """None unless all of them are, and none is an expert's."""
        if not isinstance(weights.quantized, Fp4Matrices):
            return None
        dense = all(".experts." not in name and weights.is_packed(name) for name in names)
        return cls(weights) if dense else None

    def _made(self, parts: list[PackedNumbers]) -> Projection:
        dtype = self.weights.placement.dtype
        packed = [_dense(part, dtype) for part in parts]
        if any(each is None for each in packed):
            return self._widened(parts)
        return self._joined([each for each in packed if each is not None])


def _dense(part: PackedNumbers, dtype: torch.dtype) -> fp4.Fp4Weight | None:
    """None for what kernels do not have: sizes, a scale that is too large, one that is no number."""
    if part.groups is not None or len(part.numbers) % _SIDE:
        return None
    return _of_groups(part, dtype)


def _of_groups(part: PackedNumbers, dtype: torch.dtype) -> fp4.Fp4Weight | None:
    """None for a scale that kernels do not have."""
    if part.scales.shape[1] * fp4.UNIT == part.numbers.shape[1]:
        exponents = (part.scales.contiguous().view(torch.int32) >> 23) - _ONE
        known = exponents.is_meta or int(exponents.max()) <= fp4.LARGEST
        return fp4.packed(part.numbers, exponents, dtype) if known else None
    assert part.factor is not None
    scales = (part.scales / part.factor).to(torch.float8_e4m3fn)
    known = scales.is_meta or bool(scales.float().isfinite().all())
    return fp4.packed_of_16(part.numbers, scales, part.factor, dtype) if known else None


def _packed(name: str, part: PackedNumbers, dtype: torch.dtype) -> fp4.Fp4Weight:
    if (made := _of_groups(part, dtype)) is not None:
        return made
    what = "that is no number" if part.factor is not None else f"above {2**fp4.LARGEST}, the largest there is"
    raise ConfigError(f"tensor {name} has a scale {what}: experts stay packed")
