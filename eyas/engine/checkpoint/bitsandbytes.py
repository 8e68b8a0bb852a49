"""bitsandbytes: indices of four bits into a table of values (NF4, FP4), and whole numbers of eight.

A matrix of four bits is stored flat; what is beside it says, in JSON, its shape. Its scales may be numbers of
eight bits themselves, with scales of their own ("double" or "nested" quantization).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from eyas.engine.checkpoint.packed import PackedConfig, PackedPart, Shape
from eyas.engine.checkpoint.packed_numbers import PackedNumbers, halves
from eyas.engine.checkpoint.quantized import entries, ignored_modules, refused
from eyas.engine.checkpoint.values import Raw, number, said, switch, whole, wholes

if TYPE_CHECKING:
    import torch

_BLOCK, _NESTED_BLOCK = 64, 256
_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_MOST_INT8 = 127
_SKIPS = "llm_int8_skip_modules"


@dataclass(frozen=True)
class TableConfig(PackedConfig):
    """NF4 or FP4: the table of values is stored as well."""

    ends: ClassVar[tuple[str, ...]] = (
        "weight.absmax",
        "weight",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        *_STATES,
    )
    tells: ClassVar[tuple[str, ...]] = _STATES
    integers: ClassVar[bool] = False

    def shape(self, stored: Mapping[str, Shape]) -> Shape:
        return ()

    def stated_shape(self, text: bytes) -> Shape:
        try:
            shape = wholes(_state(text), "shape", 1)
        except ValueError:
            return ()
        return shape if len(shape) == 2 else ()

    def parts(self, shape: Shape, groups: int) -> Mapping[str, PackedPart]:
        n, k = shape
        scales = n * groups
        return {
            "weight": PackedPart(("U8",), ((n * k // 2, 1), (1, n * k // 2), (n * k // 2,))),
            "weight.absmax": PackedPart(("F32", "U8"), ((scales,),)),
            "weight.quant_map": PackedPart(("F32",), ((16,),)),
            "weight.nested_absmax": PackedPart(("F32",), ((-(-scales // _NESTED_BLOCK),),), optional=True),
            "weight.nested_quant_map": PackedPart(("F32",), ((256,),), optional=True),
            **{state: PackedPart(("U8",), (), optional=True) for state in _STATES},
        }

    def read(self, parts: Mapping[str, torch.Tensor], shape: Shape, groups: int) -> PackedNumbers:
        """The upper half of a byte is the first of two numbers."""
        state = next(state for state in _STATES if state in parts)
        numbers = halves(parts["weight"].flatten()).view(-1, 2).flip(1).view(shape)
        try:
            stated = _state(bytes(parts[state].tolist()))
            whole(stated, "blocksize", least=_BLOCK, most=_BLOCK)
            scales = _scales(parts, stated)
        except LookupError as error:
            raise ValueError(f"{state} has no {error}") from None
        except ValueError as error:
            raise ValueError(f"{state}: {error}") from None
        return PackedNumbers(numbers, 0, scales.view(-1, groups), values=parts["weight.quant_map"])

    def __str__(self) -> str:
        return "bitsandbytes of 4 bits by a table"


def _state(text: bytes) -> Raw:
    try:
        stated = json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is too deep") from None
    if not isinstance(stated, dict):
        raise ValueError("it is no JSON object")
    return stated


def _scales(parts: Mapping[str, torch.Tensor], stated: Raw) -> torch.Tensor:
    """The scales of all blocks, flat, float32."""
    from torch import uint8

    stored = parts["weight.absmax"]
    if stored.dtype is not uint8:
        return stored
    for end in ("weight.nested_absmax", "weight.nested_quant_map"):
        if end not in parts:
            raise ValueError(f"there is no {end} for scales of eight bits")
    whole(stated, "nested_blocksize", least=_NESTED_BLOCK, most=_NESTED_BLOCK)
    each = parts["weight.nested_absmax"].repeat_interleave(_NESTED_BLOCK)[: len(stored)]
    wide = parts["weight.nested_quant_map"].index_select(0, stored.int())
    return wide.mul_(each).add_(number(stated, "nested_offset"))


@dataclass(frozen=True)
class RowsConfig(PackedConfig):
    """Whole numbers of eight bits; of a row, the largest is stored."""

    ends: ClassVar[tuple[str, ...]] = ("SCB", "weight", "weight_format")

    def shape(self, stored: Mapping[str, Shape]) -> Shape:
        shape = stored.get("weight", ())
        return shape if len(shape) == 2 else ()

    def parts(self, shape: Shape, groups: int) -> Mapping[str, PackedPart]:
        return {
            "weight": PackedPart(("I8",), (shape,)),
            "SCB": PackedPart(("F32",), (shape[:1],)),
            "weight_format": PackedPart(("U8",), ((), (1,)), optional=True),
        }

    def read(self, parts: Mapping[str, torch.Tensor], shape: Shape, groups: int) -> PackedNumbers:
        if "weight_format" in parts and (form := int(parts["weight_format"])):
            raise ValueError(f"weight_format is {form}: only rows (0) are read")
        return PackedNumbers(parts["weight"], 0, parts["SCB"][:, None] / _MOST_INT8)

    def __str__(self) -> str:
        return "bitsandbytes of 8 bits by output channel"


def read_bitsandbytes(raw: Raw) -> PackedConfig:
    """Reads `quant_method` bitsandbytes. What its products do in 16 bits is not stored, and left out."""
    if (storage := raw.get("bnb_4bit_quant_storage") or "uint8") != "uint8":
        raise refused(f"bitsandbytes with bnb_4bit_quant_storage {said(storage)}")
    ignored = (*ignored_modules(raw), *entries(_SKIPS, raw.get(_SKIPS) or []))
    if switch(raw, "load_in_4bit", False):
        return TableConfig(4, _BLOCK, ignored=ignored)
    if switch(raw, "load_in_8bit", False):
        return RowsConfig(8, 0, ignored=ignored)
    raise refused("bitsandbytes with neither load_in_4bit nor load_in_8bit")
