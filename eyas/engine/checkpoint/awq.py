"""AWQ, version gemm: numbers of four bits packed along n, the eight of a word in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from eyas.engine.checkpoint.packed import (
    FLOATS,
    WORDS,
    PackedConfig,
    PackedPart,
    Shape,
    bits_of,
    group_of,
)
from eyas.engine.checkpoint.packed_numbers import PackedNumbers, unpacked
from eyas.engine.checkpoint.quantized import Raw, ignored_modules, refused
from eyas.engine.checkpoint.values import said, switch

if TYPE_CHECKING:
    import torch

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place within its word of each of eight neighbours, counted from the lowest bits."""

_OTHER = {"w_bit": "bits", "q_group_size": "group_size"}
"""Older spellings."""


@dataclass(frozen=True)
class AwqConfig(PackedConfig):
    """A zero point is packed as the numbers are."""

    BITS: ClassVar[int] = 4
    ends: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")

    def shape(self, stored: Mapping[str, Shape]) -> Shape:
        match stored["qweight"]:
            case k, columns:
                return columns * len(_PLACES), k
        return ()

    def parts(self, shape: Shape, groups: int) -> Mapping[str, PackedPart]:
        n, k = shape
        return {
            "qweight": PackedPart(WORDS, ((k, n // len(_PLACES)),)),
            "qzeros": PackedPart(WORDS, ((groups, n // len(_PLACES)),)),
            "scales": PackedPart(FLOATS, ((groups, n),)),
        }

    def read(self, parts: Mapping[str, torch.Tensor], shape: Shape, groups: int) -> PackedNumbers:
        numbers, zeros = (_in_order(parts[end]) for end in ("qweight", "qzeros"))
        return PackedNumbers(numbers, zeros, parts["scales"].t())

    def __str__(self) -> str:
        return f"AWQ of {self.bits} bits {self.grouping}"


def _in_order(packed: torch.Tensor) -> torch.Tensor:
    """int32 [k, n / 8] -> uint8 [n, k]."""
    words = unpacked(packed.t(), AwqConfig.BITS)  # [n / 8, k, 8]
    return words.permute(0, 2, 1)[:, list(_PLACES)].flatten(0, 1)


def read_awq(raw: Raw) -> AwqConfig:
    """Reads `quant_method` awq."""
    raw = {new: raw[old] for old, new in _OTHER.items() if old in raw} | dict(raw)
    for key in ("version", "checkpoint_format"):
        if (form := raw.get(key) or "gemm") not in ("gemm", "GEMM"):
            raise refused(f"awq of {key} {said(form)}")
    if (backend := raw.get("backend") or "autoawq") == "llm-awq":
        raise refused(f"awq of backend {said(backend)}")
    switch(raw, "zero_point", True)  # zero points are stored where all of them are the same, too
    return AwqConfig(
        bits_of(raw, "awq", (AwqConfig.BITS,)), group_of(raw, "awq"), ignored=ignored_modules(raw)
    )
