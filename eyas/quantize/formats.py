"""The formats that are written: the tensors that a matrix is stored as, and what a config.json says of them.

Numbers are rounded to the nearest, symmetrically around zero. A matrix that a format cannot hold, for rows
that are no whole groups, say, stays as it is.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eyas.engine.checkpoint.fp4 import E2M1, OF_32
from eyas.engine.checkpoint.fp8 import LARGEST

Tensors = Mapping[str, torch.Tensor]
_WORD = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of eight neighbours: which is in a word's first, second... four bits."""

_LEAST_FP8_SCALE = 2.0**-28


class WrittenFormat(ABC):
    """A format that is written."""

    @abstractmethod
    def holds(self, n: int, k: int) -> bool:
        """True if a matrix [n, k] can be stored so."""

    @abstractmethod
    def stored(self, weight: torch.Tensor) -> Tensors:
        """The tensors that a matrix becomes, by what stands in the place of "weight" in their names."""

    @abstractmethod
    def described(self, left_out: list[str]) -> dict[str, Any]:
        """`quantization_config`. `left_out`: the modules that stay as they are."""


@dataclass(frozen=True)
class FourBitFormat(WrittenFormat):
    """A format whose words hold zero points of eight rows each; `group`: columns with one scale."""

    group: int

    def holds(self, n: int, k: int) -> bool:
        return k % self.group == 0 and n % 8 == 0


class GptqFormat(FourBitFormat):
    """GPTQ as GPTQModel writes it: packed along k, zero points less one."""

    def stored(self, weight: torch.Tensor) -> Tensors:
        n, k = weight.shape
        numbers, scales = whole_numbers(weight, self.group, 4, torch.float16)
        return {
            "qweight": packed(numbers, 4).t().contiguous(),
            "qzeros": torch.full((k // self.group, n // 8), 0x77777777, dtype=torch.int32),
            "scales": scales.t().contiguous(),
            "g_idx": torch.arange(k, dtype=torch.int32) // self.group,
        }

    def described(self, left_out: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": self.group,
            "sym": True,
            "desc_act": False,
            "checkpoint_format": "gptq",
            "dynamic": {f"-:^{re.escape(module)}$": {} for module in left_out},
        }


class AwqFormat(FourBitFormat):
    """AWQ as AutoAWQ writes its version gemm: packed along n. Nothing is scaled by activations."""

    def stored(self, weight: torch.Tensor) -> Tensors:
        n, k = weight.shape
        numbers, scales = whole_numbers(weight, self.group, 4, torch.float16)
        return {
            "qweight": packed(numbers.t(), 4, _AWQ_ORDER),
            "qzeros": torch.full((k // self.group, n // 8), 0x88888888 - 2**_WORD, dtype=torch.int32),
            "scales": scales.t().contiguous(),
        }

    def described(self, left_out: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": self.group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": left_out,
        }


class CompressedFormat(WrittenFormat):
    """A format of compressed-tensors."""

    form: str

    @abstractmethod
    def weights(self) -> dict[str, Any]:
        """The description of the weights' numbers."""

    def rows(self) -> dict[str, Any] | None:
        """The description of the rows that they multiply; None: those stay as they are."""
        return None

    def described(self, left_out: list[str]) -> dict[str, Any]:
        usual = {"dynamic": False, "symmetric": True}
        rows = self.rows()
        group = {
            "targets": ["Linear"],
            "weights": usual | self.weights(),
            "input_activations": None if rows is None else usual | rows,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": left_out,
            "kv_cache_scheme": None,
        }


@dataclass(frozen=True)
class IntegerFormat(CompressedFormat):
    """Whole numbers of 4 or 8 bits; `group` 0: a row has one scale."""

    bits: int
    group: int
    form = "pack-quantized"

    def holds(self, n: int, k: int) -> bool:
        return k % (self.group or _WORD // self.bits) == 0

    def stored(self, weight: torch.Tensor) -> Tensors:
        numbers, scales = whole_numbers(weight, self.group or weight.shape[1], self.bits, weight.dtype)
        return {
            "weight_packed": packed(numbers, self.bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }

    def weights(self) -> dict[str, Any]:
        group = {"strategy": "group", "group_size": self.group} if self.group else {"strategy": "channel"}
        return {"num_bits": self.bits, "type": "int"} | group


class Fp8Format(CompressedFormat):
    """FP8 (e4m3) with a scale for each row; rows that they multiply are rounded as well, each by its own."""

    form = "float-quantized"

    def holds(self, n: int, k: int) -> bool:
        return True

    def stored(self, weight: torch.Tensor) -> Tensors:
        wide = weight.float()
        scales = (wide.abs().amax(1, keepdim=True) / LARGEST).clamp_(min=_LEAST_FP8_SCALE)
        numbers = wide.div(scales).clamp_(-LARGEST, LARGEST)
        return {"weight": numbers.to(torch.float8_e4m3fn), "weight_scale": scales}

    def weights(self) -> dict[str, Any]:
        return {"num_bits": 8, "type": "float", "strategy": "channel"}

    def rows(self) -> dict[str, Any]:
        return {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


class Mxfp4Format(CompressedFormat):
    """Numbers in e2m1, of which 32 have one power of two."""

    form = "mxfp4-pack-quantized"

    def holds(self, n: int, k: int) -> bool:
        return k % OF_32 == 0

    def stored(self, weight: torch.Tensor) -> Tensors:
        n, k = weight.shape
        groups = weight.float().reshape(n, k // OF_32, OF_32)
        largest = groups.abs().amax(-1, keepdim=True)
        exponents = (largest / E2M1[-1]).clamp(min=2.0**-126).log2().ceil()
        numbers = in_e2m1(groups / exponents.exp2()).view(n, k // 2, 2)
        return {
            "weight_packed": numbers[..., 0] | numbers[..., 1] << 4,
            "weight_scale": exponents.add_(127).to(torch.uint8).view(n, -1),
        }

    def weights(self) -> dict[str, Any]:
        return {"num_bits": 4, "type": "float", "strategy": "group", "group_size": OF_32}


def whole_numbers(
    weight: torch.Tensor, group: int, bits: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [n, k] -> its numbers, half the range added, uint8 [n, k], and scales [n, k / group].

    No scale is below the smallest number of its type that has all its digits.
    """
    half, least = 2 ** (bits - 1), torch.finfo(dtype).tiny
    groups = weight.float().reshape(len(weight), -1, group)
    scales = (groups.abs().amax(-1) / (half - 0.5)).clamp_(min=least).to(dtype)
    numbers = groups.div(scales.float()[..., None]).round_().clamp_(-half, half - 1).add_(half)
    return numbers.to(torch.uint8).view(weight.shape), scales


def packed(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Numbers uint8 [n, k] -> words int32 [n, k * bits / 32]; `order`: which is first, second..."""
    each = _WORD // bits
    places = numbers.reshape(len(numbers), -1, each)
    words = torch.zeros(places.shape[:2], dtype=torch.int32)
    for place, number in enumerate(order or range(each)):
        words |= places[..., number].int() << bits * place
    return words


def in_e2m1(wide: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of four bits, uint8."""
    values = wide.new_tensor(E2M1)
    nearest = torch.bucketize(wide.abs(), (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8)
    return nearest | wide.lt(0).to(torch.uint8) << 3


def written_format(name: str, group: int) -> WrittenFormat:
    """The format of that name (`eyas.quantize.flags.FORMATS`)."""
    made: dict[str, WrittenFormat] = {
        "gptq": GptqFormat(group),
        "awq": AwqFormat(group),
        "int4": IntegerFormat(4, group),
        "int8": IntegerFormat(8, 0),
        "fp8": Fp8Format(),
        "mxfp4": Mxfp4Format(),
    }
    return made[name]
