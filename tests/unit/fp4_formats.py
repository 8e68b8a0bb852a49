"""Formats of numbers in e2m1, written number by number, and what they mean."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.unit.packed_formats import Packing, Tensors, compressed

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@dataclass(frozen=True)
class Fp4:
    """A weight [n, k]: numbers, and a scale for each group of a row: what is stored of it, times `all`."""

    numbers: list[list[int]]
    scales: torch.Tensor
    stored: torch.Tensor
    all: float = 1.0

    def meant(self) -> torch.Tensor:
        size = len(self.numbers[0]) // self.scales.shape[1]
        scales = self.scales.tolist()
        rows = [
            [VALUES[number] * scales[r][c // size] for c, number in enumerate(row)]
            for r, row in enumerate(self.numbers)
        ]
        return torch.tensor(rows)

    def packed(self) -> torch.Tensor:
        """Two numbers in a byte, the first in its lower half."""
        rows = [[row[c] + 16 * row[c + 1] for c in range(0, len(row), 2)] for row in self.numbers]
        return torch.tensor(rows, dtype=torch.uint8)


def nearest(weight: torch.Tensor, scales: torch.Tensor, stored: torch.Tensor, whole: float = 1.0) -> Fp4:
    each = weight / scales.repeat_interleave(weight.shape[1] // scales.shape[1], 1)
    numbers = (each[..., None] - torch.tensor(VALUES)).abs().argmin(-1)
    return Fp4(numbers.tolist(), scales, stored, whole)


def mxfp4(weight: torch.Tensor) -> Fp4:
    """Scales are powers of two, of 32 numbers each."""
    most = weight.unflatten(1, (-1, 32)).abs().amax(-1)
    exponents = (most / 6).log2().ceil()
    return nearest(weight, 2.0**exponents, (exponents + 127).to(torch.uint8))


def mx_matrices(weight: Fp4) -> Tensors:
    return {"weight_packed": weight.packed(), "weight_scale": weight.stored}


def mx_experts(name: str, weights: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Experts [experts, k, n] as gpt-oss stores them, and what they mean."""
    each = [mxfp4(weight.t()) for weight in weights]
    blocks = torch.stack([one.packed().unflatten(1, (-1, 16)) for one in each])
    scales = torch.stack([one.stored for one in each])
    stored = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return stored, torch.stack([one.meant().t() for one in each])


def nvfp4(weight: torch.Tensor, *, divides: bool = True) -> Fp4:
    """Scales are in FP8, of 16 numbers each, and there is one more for all."""
    most = weight.unflatten(1, (-1, 16)).abs().amax(-1)
    whole = (most.max() / 6 / 448).reciprocal() if divides else most.max() / 6 / 448
    stored = (most / 6 * whole if divides else most / 6 / whole).to(torch.float8_e4m3fn)
    scales = stored.float() / whole if divides else stored.float() * whole
    return nearest(weight, scales, stored, float(whole))


def nv_matrices(weight: Fp4) -> Tensors:
    return mx_matrices(weight) | {
        "weight_global_scale": torch.tensor([weight.all]),
        "input_global_scale": torch.tensor([300.0]),
    }


def nv_modelopt(weight: Fp4) -> Tensors:
    return {
        "weight": weight.packed(),
        "weight_scale": weight.stored,
        "weight_scale_2": torch.tensor(weight.all),
        "input_scale": torch.tensor(0.02),
    }


def modelopt(algorithm: str = "NVFP4", **told: Any) -> dict[str, Any]:
    usual = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*.norm*"]}
    return usual | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}} | told


def _fp4(form: str, size: int, write: Callable[[Fp4], Tensors], quantise: Callable[..., Fp4]) -> Packing:
    told = compressed(form, type="float", num_bits=4, group_size=size, strategy="group")
    return Packing(told, write, quantise=quantise)


FP4: dict[str, Packing] = {
    "mxfp4": _fp4("mxfp4-pack-quantized", 32, mx_matrices, mxfp4),
    "nvfp4": _fp4("nvfp4-pack-quantized", 16, nv_matrices, nvfp4),
    "modelopt": Packing(modelopt(), nv_modelopt, quantise=functools.partial(nvfp4, divides=False)),
}


def gpt_oss(**told: Any) -> dict[str, Any]:
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return {"quant_method": "mxfp4", "modules_to_not_convert": kept} | told
