"""Weights of four bits as kernels read them: integers with a scale, and perhaps a zero point, per group.

GPTQ, AWQ, AutoRound and compressed-tensors differ in how they pack, and not in what that means: all become
`Int4Weight`. Rows stay as they are. A matrix that no kernel reads (a rank's share that cuts through groups,
other sizes) is widened as it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from eyas.engine.checkpoint.packed import PackedConfig
from eyas.engine.checkpoint.packed_numbers import PackedNumbers
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.ordered import by_groups, ordered
from eyas.engine.formats.packed import PackedLoader, in_order
from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.products import int4
from eyas.engine.kernels.products.skinny_tiles import MOST_STRETCHES

_BITS = 4


@dataclass(frozen=True)
class Int4Loader(PackedLoader):
    """A `ProjectionLoader` of packed integers of four bits."""

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
        return not config.by_activations

    def _made(self, parts: list[PackedNumbers]) -> Projection:
        dtype = self.weights.placement.dtype
        given, order = self._in_order([in_order(part) for part in parts])
        if not all(map(self._is_served, given)):
            return self._widened(parts)
        stretch = self._stretch(given[0].numbers.shape[1])
        packed = [int4.packed(part.numbers, part.zeros, part.scales, dtype, stretch) for part in given]
        return ordered(self._joined(packed), order)

    @staticmethod
    def _in_order(parts: list[PackedNumbers]) -> tuple[list[PackedNumbers], torch.Tensor | None]:
        """Columns in the order of their groups, if products may have that, and the order."""
        return by_groups(parts)

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

    @staticmethod
    def _in_order(parts: list[PackedNumbers]) -> tuple[list[PackedNumbers], torch.Tensor | None]:
        return parts, None

    def _made(self, parts: list[PackedNumbers]) -> Projection:
        dtype = self.weights.placement.dtype
        return super()._made([replace(part, scales=part.scales.to(dtype)) for part in parts])

    def _stretch(self, k: int) -> int:
        return k // MOST_STRETCHES
