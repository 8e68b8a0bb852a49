"""Numbers of four bits in floating point (e2m1), two in a byte: MXFP4 (gpt-oss, or any matrix) and NVFP4.

How a format rounds the rows that they multiply is left out: they are weights alone here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from eyas.engine.checkpoint.packed import PackedConfig, PackedPart, Shape
from eyas.engine.checkpoint.packed_numbers import PackedNumbers, halves
from eyas.engine.checkpoint.quantized import Raw, ignored_modules, refused
from eyas.engine.checkpoint.values import said

if TYPE_CHECKING:
    import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the numbers from 0 on; those from 8 on are the same, negative."""

OF_32 = 32
"""Numbers of MXFP4 that have one scale, a power of two."""

OF_16 = 16
"""Numbers of NVFP4 that have one, of FP8."""

_HALF = 16  # bytes of them
_EIGHT_BITS = ("U8", "F8_E8M0")
_BIAS, _FLOAT64_BIAS, _FLOAT64_DIGITS = 127, 1023, 52


@dataclass(frozen=True)
class Mxfp4Experts(PackedConfig):
    """Scales are exponents of two, 127 added, in eight bits."""

    ends: ClassVar[tuple[str, ...]] = ("blocks", "scales")
    of_experts: ClassVar[bool] = True
    integers: ClassVar[bool] = False

    def shape(self, stored: Mapping[str, Shape]) -> Shape:
        match stored["blocks"]:
            case experts, n, groups, _:
                return experts, groups * OF_32, n
        return ()

    def parts(self, shape: Shape, groups: int) -> Mapping[str, PackedPart]:
        experts, _, n = shape
        return {
            "blocks": PackedPart(("U8",), ((experts, n, groups, _HALF),)),
            "scales": PackedPart(_EIGHT_BITS, ((experts, n, groups),)),
        }

    def read(self, parts: Mapping[str, torch.Tensor], shape: Shape, groups: int) -> PackedNumbers:
        return e2m1(parts["blocks"].flatten(1), powers(parts["scales"]))

    def bytes_of_32(self, experts: bool, exact: bool) -> int | None:
        return 17 if experts and not exact else None

    def __str__(self) -> str:
        return "MXFP4 of experts"


@dataclass(frozen=True)
class Fp4Matrices(PackedConfig):
    """A row's halves of bytes, and a scale of eight bits for each group of it."""

    integers: ClassVar[bool] = False
    numbers: ClassVar[str] = "weight_packed"
    scales: ClassVar[tuple[str, ...]]

    def shape(self, stored: Mapping[str, Shape]) -> Shape:
        match stored.get(self.numbers, ()):
            case n, half:
                return n, 2 * half
        return ()

    def parts(self, shape: Shape, groups: int) -> Mapping[str, PackedPart]:
        n, k = shape
        return {
            self.numbers: PackedPart(("U8",), ((n, k // 2),)),
            "weight_scale": PackedPart(self.scales, ((n, groups),)),
        }


@dataclass(frozen=True)
class Mxfp4Matrices(Fp4Matrices):
    """MXFP4 as compressed-tensors stores it: mxfp4-pack-quantized."""

    ends: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale", "input_global_scale")
    scales: ClassVar[tuple[str, ...]] = _EIGHT_BITS

    def read(self, parts: Mapping[str, torch.Tensor], shape: Shape, groups: int) -> PackedNumbers:
        return e2m1(parts["weight_packed"], powers(parts["weight_scale"]))

    def bytes_of_32(self, experts: bool, exact: bool) -> int | None:
        return None if exact else 17

    def __str__(self) -> str:
        return "MXFP4"


@dataclass(frozen=True)
class Nvfp4Matrices(Fp4Matrices):
    """Scales are in FP8 (e4m3), and a number for the whole matrix divides them: nvfp4-pack-quantized."""

    ends: ClassVar[tuple[str, ...]] = (
        "weight_packed",
        "weight_scale",
        "weight_global_scale",
        "input_global_scale",
    )
    scales: ClassVar[tuple[str, ...]] = ("F8_E4M3",)
    whole: ClassVar[str] = "weight_global_scale"
    divides: ClassVar[bool] = True

    def parts(self, shape: Shape, groups: int) -> Mapping[str, PackedPart]:
        return {**super().parts(shape, groups), self.whole: PackedPart(("F32",), ((1,), ()))}

    def read(self, parts: Mapping[str, torch.Tensor], shape: Shape, groups: int) -> PackedNumbers:
        whole = parts[self.whole].reshape(1)
        scales = parts["weight_scale"].float()
        made = e2m1(parts[self.numbers], scales / whole if self.divides else scales * whole)
        return replace(made, factor=whole.reciprocal() if self.divides else whole)

    def bytes_of_32(self, experts: bool, exact: bool) -> int | None:
        return None if exact else 18

    def __str__(self) -> str:
        return "NVFP4"


@dataclass(frozen=True)
class ModelOptNvfp4(Nvfp4Matrices):
    """The matrix's number multiplies them: as ModelOpt stores it."""

    ends: ClassVar[tuple[str, ...]] = ("weight_scale_2", "weight", "weight_scale", "input_scale")
    numbers: ClassVar[str] = "weight"
    whole: ClassVar[str] = "weight_scale_2"
    divides: ClassVar[bool] = False


def e2m1(packed: torch.Tensor, scales: torch.Tensor) -> PackedNumbers:
    """Bytes [n, k / 2], the lower half of each first, with scales [n, groups]."""
    return PackedNumbers(halves(packed), 0, scales, values=values(scales))


def values(like: torch.Tensor) -> torch.Tensor:
    """The values of the sixteen numbers, on the device and in the dtype of `like`."""
    return like.new_tensor((*E2M1, *(-value for value in E2M1)))


def powers(stored: torch.Tensor) -> torch.Tensor:
    """Exponents in eight bits (e8m0) -> the powers of two, float32; infinity for 255, which is NaN there."""
    from torch import float32, float64, int64, uint8

    bits = stored.view(uint8).to(int64).add_(_FLOAT64_BIAS - _BIAS).bitwise_left_shift_(_FLOAT64_DIGITS)
    return bits.view(float64).to(float32)


def read_mxfp4(raw: Raw) -> Mxfp4Experts:
    """Reads `quant_method` mxfp4."""
    for key in ("group_size", "block_size"):
        if (size := raw.get(key, OF_32)) != OF_32:
            raise refused(f"mxfp4 with {key} {said(size)}")
    return Mxfp4Experts(4, OF_32, ignored=ignored_modules(raw))
