"""Numbers of four bits in floating point (e2m1), two in a byte: MXFP4 of gpt-oss's experts, and of matrices.

How a format rounds the rows that they multiply is left out: they are weights alone here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from eyas.engine.checkpoint.packed import PackedConfig, PackedPart, Shape
from eyas.engine.checkpoint.packed_numbers import PackedNumbers, halves
from eyas.engine.checkpoint.quantized import Raw, ignored_modules, refused
from eyas.engine.checkpoint.values import said

if TYPE_CHECKING:
    import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the numbers from 0 on; those from 8 on are the same, negative."""

POWERS_OF_32 = 32
"""Numbers of MXFP4 that have one scale, a power of two."""

_HALF = 16  # bytes of them
_EIGHT_BITS = ("U8", "F8_E8M0")
_BIAS, _FLOAT64_BIAS, _FLOAT64_DIGITS = 127, 1023, 52


@dataclass(frozen=True)
class Mxfp4Experts(PackedConfig):
    """Scales are exponents of two, 127 added, in eight bits."""

    ends: ClassVar[tuple[str, ...]] = ("blocks", "scales")
    of_experts: ClassVar[bool] = True

    def shape(self, stored: Mapping[str, Shape]) -> Shape:
        match stored["blocks"]:
            case experts, n, groups, _:
                return experts, groups * POWERS_OF_32, n
        return ()

    def parts(self, shape: Shape, groups: int) -> Mapping[str, PackedPart]:
        experts, _, n = shape
        return {
            "blocks": PackedPart(("U8",), ((experts, n, groups, _HALF),)),
            "scales": PackedPart(_EIGHT_BITS, ((experts, n, groups),)),
        }

    def read(self, parts: Mapping[str, torch.Tensor], shape: Shape, groups: int) -> PackedNumbers:
        return e2m1(parts["blocks"].flatten(1), powers(parts["scales"]))

    def __str__(self) -> str:
        return "MXFP4 of experts, widened as they are loaded"


@dataclass(frozen=True)
class Mxfp4Matrices(PackedConfig):
    """As compressed-tensors stores it: mxfp4-pack-quantized."""

    ends: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale")

    def shape(self, stored: Mapping[str, Shape]) -> Shape:
        match stored["weight_packed"]:
            case n, half:
                return n, 2 * half
        return ()

    def parts(self, shape: Shape, groups: int) -> Mapping[str, PackedPart]:
        n, k = shape
        return {
            "weight_packed": PackedPart(("U8",), ((n, k // 2),)),
            "weight_scale": PackedPart(_EIGHT_BITS, ((n, groups),)),
        }

    def read(self, parts: Mapping[str, torch.Tensor], shape: Shape, groups: int) -> PackedNumbers:
        return e2m1(parts["weight_packed"], powers(parts["weight_scale"]))

    def __str__(self) -> str:
        return "MXFP4, widened as they are loaded"


def e2m1(packed: torch.Tensor, scales: torch.Tensor) -> PackedNumbers:
    """Bytes [n, k / 2], the lower half of each first, with scales [n, groups]."""
    values = scales.new_tensor((*E2M1, *(-value for value in E2M1)))
    return PackedNumbers(halves(packed), 0, scales, values=values)


def powers(stored: torch.Tensor) -> torch.Tensor:
    """Exponents in eight bits (e8m0) -> the powers of two, float32; infinity for 255, which is NaN there."""
    from torch import float32, float64, int64, uint8

    bits = stored.view(uint8).to(int64).add_(_FLOAT64_BIAS - _BIAS).bitwise_left_shift_(_FLOAT64_DIGITS)
    return bits.view(float64).to(float32)


def read_mxfp4(raw: Raw) -> Mxfp4Experts:
    """Of `quant_method` mxfp4."""
    for key in ("group_size", "block_size"):
        if (size := raw.get(key, POWERS_OF_32)) != POWERS_OF_32:
            raise refused(f"mxfp4 with {key} {said(size)}")
    return Mxfp4Experts(4, POWERS_OF_32, ignored=ignored_modules(raw))
