"""Formats of bitsandbytes: tensors as its checkpoints hold them, and what they mean."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from tests.unit.packed_formats import SHAPE, Packing, Tensors

TABLE = [  # NormalFloat
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
]  # fmt: skip
NESTED = [each / 127.5 - 1 for each in range(256)]


@dataclass(frozen=True)
class Blocks:
    """A weight's numbers, one after the other, with the largest of each 64 of them."""

    shape: tuple[int, int]
    numbers: list[int]
    largest: torch.Tensor
    stored: Tensors
    state: dict[str, Any]

    def meant(self) -> torch.Tensor:
        values = torch.tensor([TABLE[number] for number in self.numbers])
        return (values.view(-1, 64) * self.largest[:, None]).view(self.shape)


def blocks(weight: torch.Tensor, *, nested: bool = False) -> Blocks:
    flat = weight.flatten()
    exact = flat.view(-1, 64).abs().amax(1)
    stored: Tensors = {"absmax": exact}
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "float16",
        "shape": list(weight.shape),
    }
    if nested:
        offset = float(exact.mean())
        wide = exact - offset
        scales = torch.stack([part.abs().max() for part in wide.split(256)])
        each = scales.repeat_interleave(256)[: len(wide)]
        index = ((wide / each)[:, None] - torch.tensor(NESTED)).abs().argmin(1)
        exact = torch.tensor(NESTED)[index] * each + offset
        stored = {"absmax": index.byte(), "nested_absmax": scales, "nested_quant_map": torch.tensor(NESTED)}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    ratio = flat / exact.repeat_interleave(64)
    numbers = (ratio[:, None] - torch.tensor(TABLE)).abs().argmin(1)
    return Blocks((weight.shape[0], weight.shape[1]), numbers.tolist(), exact, stored, state)


def table(weight: Blocks) -> Tensors:
    """The first of two numbers in a byte's upper half."""
    pairs = zip(weight.numbers[::2], weight.numbers[1::2], strict=True)
    packed = torch.tensor([[16 * first + second] for first, second in pairs], dtype=torch.uint8)
    parts = weight.stored | {
        "quant_map": torch.tensor(TABLE),
        "quant_state.bitsandbytes__nf4": text(weight.state),
    }
    return {"weight": packed} | {f"weight.{end}": tensor for end, tensor in parts.items()}


def text(state: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


@dataclass(frozen=True)
class Rows:
    numbers: torch.Tensor
    largest: torch.Tensor

    def meant(self) -> torch.Tensor:
        return self.numbers.float() * (self.largest / 127)[:, None]


def rows(weight: torch.Tensor) -> Rows:
    largest = weight.abs().amax(1)
    return Rows((weight * 127 / largest[:, None]).round().to(torch.int8), largest)


def int8(weight: Rows) -> Tensors:
    return {
        "weight": weight.numbers,
        "SCB": weight.largest,
        "weight_format": torch.zeros((), dtype=torch.uint8),
    }


def told(bits: int = 4, **more: Any) -> dict[str, Any]:
    usual = {"quant_method": "bitsandbytes", "load_in_4bit": bits == 4, "load_in_8bit": bits == 8}
    more = {"bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4"} | more
    return usual | {"llm_int8_skip_modules": None, "bnb_4bit_use_double_quant": True} | more


FORMATS = {
    "nf4": Packing(told(), table, quantise=blocks),
    "nf4, nested": Packing(told(), table, quantise=lambda weight: blocks(weight, nested=True)),
    "int8": Packing(told(8), int8, quantise=rows),
}


def state(**changes: Any) -> torch.Tensor:
    usual = {"blocksize": 64, "shape": list(SHAPE), "nested_blocksize": 256, "nested_offset": 0.1}
    return text({key: value for key, value in (usual | changes).items() if value is not None})
