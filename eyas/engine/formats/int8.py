"""Whole numbers of eight bits as kernels read them: GPTQ, compressed-tensors and bitsandbytes become
`Int8Weight`.

Rows stay as they are. A matrix that no kernel reads (a rank's share that cuts through groups, other sizes) is
widened as it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from eyas.engine.checkpoint.packed import PackedConfig
from eyas.engine.checkpoint.packed_numbers import PackedNumbers
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.ordered import by_groups, ordered
from eyas.engine.formats.packed import PackedLoader, in_order
from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.products import int8

_BITS = 8


@dataclass(frozen=True)
class Int8Loader(PackedLoader):
    """A `ProjectionLoader` of packed integers of eight bits."""

    @classmethod
    def of(cls, weights: WeightSource, names: list[str]) -> Self | None:
        """None unless all of them are packed integers of eight bits. Experts' columns must be in their order:
        what is widened is so for all of them alike.
        """
        config = weights.quantized
        if not isinstance(config, PackedConfig) or config.bits != _BITS or not config.integers:
            return None
        ordered = config.by_activations and any(".experts." in name for name in names)
        return cls(weights) if not ordered and all(map(weights.is_packed, names)) else None

    def _made(self, parts: list[PackedNumbers]) -> Projection:
        dtype = self.weights.placement.dtype
        given, order = by_groups([in_order(part) for part in parts])
        if not all(map(_is_served, given)):
            return self._widened(parts)
        packed = [int8.packed(part.numbers, part.zeros, part.scales, dtype) for part in given]
        return ordered(self._joined(packed), order)


def _is_served(part: PackedNumbers) -> bool:
    """True if kernels have its sizes."""
    (n, k), groups = part.numbers.shape, part.scales.shape[1]
    return part.groups is None and part.values is None and n % 16 == 0 and int8.served(k, groups)
