"""GPTQ: numbers packed along k, the lowest first; `g_idx` says which group a column is of.

AutoGPTQ, GPTQModel and AutoRound write it. A zero point is stored less one, or as it is ("gptq_v2").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from eyas.engine.checkpoint.awq import AwqConfig
from eyas.engine.checkpoint.packed import (
    FLOATS,
    WHOLE,
    WORDS,
    MixedConfig,
    PackedConfig,
    PackedPart,
    Shape,
    bits_of,
    group_of,
    mixed,
    words,
)
from eyas.engine.checkpoint.packed_numbers import PackedNumbers, columns_groups, unpacked
from eyas.engine.checkpoint.quantized import Raw, entries, ignored_modules, refused
from eyas.engine.checkpoint.values import said, section, switch

if TYPE_CHECKING:
    import torch

BITS = (2, 3, 4, 8)
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""One of each number in a word. None of 3 bits: writers do not agree what is taken there."""

_FORMATS = {"gptq": 1, "gptq_v2": 0}
_OTHER = ("is_marlin_format", "adapter", "rotation")
"""Fields that, if they say anything, say that the tensors mean something else."""

_AUTO_ROUND = {
    "auto_round:auto_gptq": 1,
    "auto_round:gptq": 1,
    "auto_round": 0,
    "auto_round:gptqmodel": 0,
    "auto_round:gptq_v2": 0,
}
"""By `packing_format`: what is taken from a zero point before it is stored."""

_AUTO_ROUND_AWQ = ("auto_round:auto_awq", "auto_round:awq")


@dataclass(frozen=True)
class GptqConfig(PackedConfig):
    """`less`: what was taken from zero points before they were stored. `by_activations` (desc_act): columns
    are in groups as `g_idx` says, and not without it.
    """

    ends: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")
    less: int = 1
    by_activations: bool = False

    def shape(self, stored: Mapping[str, Shape]) -> Shape:
        match stored["qweight"]:
            case rows, n if self.bits != 3 or (rows % 3 == 0 and n % 32 == 0):
                return n, rows * 32 // self.bits
        return ()

    def parts(self, shape: Shape, groups: int) -> Mapping[str, PackedPart]:
        n, k = shape
        return {
            "qweight": PackedPart(WORDS, ((words(k, self.bits), n),)),
            "qzeros": PackedPart(WORDS, ((groups, words(n, self.bits)),)),
            "scales": PackedPart(FLOATS, ((groups, n),)),
            "g_idx": PackedPart(WHOLE, ((k,),), optional=not self.by_activations),
        }

    def read(self, parts: Mapping[str, torch.Tensor], shape: Shape, groups: int) -> PackedNumbers:
        """Adds one to a whole word of zero points, as it was taken: a zero in it borrowed of the next."""
        n, _ = shape
        numbers = unpacked(parts["qweight"].t(), self.bits).flatten(1)
        stored = parts["qzeros"] + (_ONES[self.bits] if self.less else 0)
        zeros = unpacked(stored, self.bits).flatten(1)[:, :n].t()
        of = columns_groups(parts["g_idx"], groups, "g_idx") if "g_idx" in parts else None
        return PackedNumbers(numbers, zeros, parts["scales"].t(), of)

    def __str__(self) -> str:
        return f"GPTQ of {self.bits} bits {self.grouping}"


def read_gptq(raw: Raw) -> PackedConfig | MixedConfig:
    """Reads `quant_method` gptq. A module that "dynamic" leaves out ("-:") is stored as it was; other modules
    that it names have their own bits and groups.
    """
    for key in _OTHER:
        if raw.get(key):
            raise refused(f"gptq with {key} {said(raw[key])}")
    if (words_of := raw.get("pack_dtype") or "int32") != "int32":
        raise refused(f"gptq with pack_dtype {said(words_of)}")
    own, left_out = [], []
    for pattern, change in section(raw, "dynamic").items():
        if pattern.startswith("-:"):
            left_out.append(f"re:{pattern[2:]}")
        else:
            changed = section({pattern: change}, pattern)
            own.append((f"re:{pattern.removeprefix('+:')}", _gptq({**raw, **changed})))
    entries("dynamic", [entry for entry, _ in own])
    ignored = (*ignored_modules(raw), *entries("dynamic", left_out))
    return mixed(own, _gptq(raw), ignored)


def _gptq(raw: Raw) -> GptqConfig:
    form = raw.get("checkpoint_format") or raw.get("format") or "gptq"
    if not isinstance(form, str) or form not in _FORMATS:
        raise refused(f"gptq with checkpoint_format {said(form)}")
    switch(raw, "sym", True)
    return _checked(
        "gptq",
        GptqConfig(
            bits_of(raw, "gptq", BITS),
            group_of(raw, "gptq"),
            less=_FORMATS[form],
            by_activations=switch(raw, "desc_act", False),
        ),
    )


def _checked(what: str, config: GptqConfig) -> GptqConfig:
    if config.less and config.bits not in _ONES:
        raise refused(f"{what} of {config.bits} bits whose zero points are stored less one")
    return config


def read_auto_round(raw: Raw) -> PackedConfig | MixedConfig:
    """Reads `quant_method` auto-round, which packs as GPTQ or AWQ does. Modules that `extra_config` names
    have their own bits and groups; of 16 and more bits, they are stored as they were.
    """
    if (rows := raw.get("act_bits")) is not None and not (isinstance(rows, int) and rows >= 16):
        raise refused(f"auto-round with act_bits {said(rows)}")
    own, left_out = [], []
    for name, change in section(raw, "extra_config").items():
        changed = {**raw, **section({name: change}, name)}
        if isinstance(bits := changed.get("bits"), int) and bits >= 16:
            left_out.append(name)
        else:
            own.append((name, _auto_round(changed)))
    return mixed(own, _auto_round(raw), (*ignored_modules(raw), *entries("extra_config", left_out)))


def _auto_round(raw: Raw) -> PackedConfig:
    form = raw.get("packing_format") or "auto_round:auto_gptq"
    if (kind := raw.get("data_type") or "int") != "int":
        raise refused(f"auto-round with data_type {said(kind)}")
    bits, group = bits_of(raw, "auto-round", BITS), group_of(raw, "auto-round")
    switch(raw, "sym", True)
    if form in _AUTO_ROUND_AWQ and bits == AwqConfig.BITS:
        return AwqConfig(bits, group)
    if not isinstance(form, str) or form not in _AUTO_ROUND:
        raise refused(f"auto-round with packing_format {said(form)}")
    return _checked("auto-round", GptqConfig(bits, group, less=_AUTO_ROUND[form]))
