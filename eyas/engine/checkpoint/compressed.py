"""compressed-tensors: FP8, MXFP4, NVFP4, or whole numbers of four or eight bits, along k or each in a byte.

Groups of its config.json may name different modules, never different kinds. How a format rounds the rows that
whole numbers multiply (W8A8) is left out: those are weights alone here, and rows are as they are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from eyas.engine.checkpoint.fp4 import OF_16, OF_32, Mxfp4Matrices, Nvfp4Matrices
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
    words,
)
from eyas.engine.checkpoint.packed_numbers import PackedNumbers, columns_groups, unpacked
from eyas.engine.checkpoint.quantized import (
    FP8_SIDE,
    Fp8Config,
    QuantizedConfig,
    Raw,
    RowScales,
    entries,
    ignored_modules,
    refused,
)
from eyas.engine.checkpoint.values import said, section, switch

if TYPE_CHECKING:
    import torch

BITS = (4, 8)
_FLOAT_FORMATS = ("float-quantized", "naive-quantized")
_CLASSES = ("Linear",)
_ROWS = ("input_scale", "input_zero_point")
_BYTES = ("I8",)


@dataclass(frozen=True)
class IntegerConfig(PackedConfig):
    """A zero point and a scale for each group, output channel or, if `whole`, matrix.

    `symmetric`: there are no zero points. `by_activations`: columns are in groups as `weight_g_idx` says, and
    not without it. `rounds_rows`: the format rounds the rows that numbers multiply, which is left out here.
    """

    symmetric: bool = True
    whole: bool = False
    by_activations: bool = False
    rounds_rows: bool = False

    def parts(self, shape: Shape, groups: int) -> Mapping[str, PackedPart]:
        n, k = shape
        scales = ((1,), (), (1, 1)) if self.whole else ((n, groups), *(((n,),) if groups == 1 else ()))
        points = {} if self.symmetric else {"weight_zero_point": self._zeros(scales, n, groups)}
        return points | {
            "weight_scale": PackedPart(FLOATS, scales),
            "weight_g_idx": PackedPart(WHOLE, ((k,),), optional=not self.by_activations),
        }

    @abstractmethod
    def _zeros(self, scales: tuple[Shape, ...], n: int, groups: int) -> PackedPart:
        """The stored zero points, where there are any."""

    def _read(
        self, numbers: torch.Tensor, zeros: torch.Tensor | int, parts: Mapping[str, torch.Tensor], groups: int
    ) -> PackedNumbers:
        """Joins numbers, and zero points [n, groups], with their scales and groups."""
        scales = parts["weight_scale"].reshape(-1, groups).expand(numbers.shape[0], -1)
        stored, of = parts.get("weight_g_idx"), None
        if stored is not None and not (stored == -1).all():  # -1: made before it was known
            of = columns_groups(stored, groups, "weight_g_idx")
        return PackedNumbers(numbers, zeros, scales, of)

    def __str__(self) -> str:
        rows = ", and their rows stay as they are" if self.rounds_rows else ""
        scales = "by tensor" if self.whole else self.grouping
        return f"INT{self.bits} {scales}{rows}"


@dataclass(frozen=True)
class PackedIntegers(IntegerConfig):
    """pack-quantized: half the range is added to a number; words go along k, of zero points along n."""

    ends: ClassVar[tuple[str, ...]] = (
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_g_idx",
        "weight_shape",
        *_ROWS,
    )

    def shape(self, stored: Mapping[str, Shape]) -> Shape:
        match stored["weight_packed"]:
            case n, columns:
                return n, columns * 32 // self.bits
        return ()

    def parts(self, shape: Shape, groups: int) -> Mapping[str, PackedPart]:
        return {
            "weight_packed": PackedPart(WORDS, ((shape[0], words(shape[1], self.bits)),)),
            "weight_shape": PackedPart(WHOLE, ((2,),)),
            **super().parts(shape, groups),
        }

    def _zeros(self, scales: tuple[Shape, ...], n: int, groups: int) -> PackedPart:
        if self.whole:
            return PackedPart(_BYTES, scales)
        return PackedPart(WORDS, ((words(n, self.bits), groups),))

    def read(self, parts: Mapping[str, torch.Tensor], shape: Shape, groups: int) -> PackedNumbers:
        if (stored := tuple(parts["weight_shape"].tolist())) != shape:
            raise ValueError(f"weight_shape is {stored}, and {shape} is packed")
        half = 1 << self.bits - 1
        zeros: torch.Tensor | int = half
        if not self.symmetric:
            zeros = self._points(parts["weight_zero_point"], shape[0], half)
        return self._read(unpacked(parts["weight_packed"], self.bits).flatten(1), zeros, parts, groups)

    def _points(self, stored: torch.Tensor, n: int, half: int) -> torch.Tensor:
        """Zero points [n, groups], half the range added as it is to numbers."""
        if self.whole:
            return stored.reshape(1, 1).int().add(half).expand(n, 1)
        return unpacked(stored.t(), self.bits).flatten(1)[:, :n].t()


@dataclass(frozen=True)
class PlainIntegers(IntegerConfig):
    """int-quantized: a number is a byte, with its sign. They are read from 0 on, as others are."""

    ends: ClassVar[tuple[str, ...]] = ("weight_scale", "weight", "weight_zero_point", "weight_g_idx", *_ROWS)

    def shape(self, stored: Mapping[str, Shape]) -> Shape:
        shape = stored.get("weight", ())
        return shape if len(shape) == 2 else ()

    def parts(self, shape: Shape, groups: int) -> Mapping[str, PackedPart]:
        return {"weight": PackedPart(_BYTES, (shape,)), **super().parts(shape, groups)}

    def _zeros(self, scales: tuple[Shape, ...], n: int, groups: int) -> PackedPart:
        return PackedPart(_BYTES, scales)

    def read(self, parts: Mapping[str, torch.Tensor], shape: Shape, groups: int) -> PackedNumbers:
        from torch import uint8

        half = 1 << self.bits - 1
        zeros: torch.Tensor | int = half
        if not self.symmetric:
            zeros = parts["weight_zero_point"].short().add_(half).reshape(-1, groups).expand(shape[0], -1)
        numbers = parts["weight"].short().add_(half)
        if self.bits < 8 and not 0 <= int(numbers.min()) <= int(numbers.max()) < 2 * half:
            raise ValueError(f"weight holds numbers of more than {self.bits} bits")
        return self._read(numbers.to(uint8), zeros, parts, groups)


_INTEGERS: dict[str, type[IntegerConfig]] = {
    "pack-quantized": PackedIntegers,
    "int-quantized": PlainIntegers,
    "naive-quantized": PlainIntegers,
}
"""By `format`."""


_FP4: dict[str, tuple[type[PackedConfig], int]] = {
    "mxfp4-pack-quantized": (Mxfp4Matrices, OF_32),
    "nvfp4-pack-quantized": (Nvfp4Matrices, OF_16),
}
"""By `format`: with the numbers of a row that have one scale."""


def read_compressed(raw: Raw) -> QuantizedConfig:
    """Reads `quant_method` compressed-tensors."""
    for key in ("sparsity_config", "transform_config"):
        given = section(raw, key)
        if given and given.get("format") != "dense":
            what = given.get("sparsity_structure") or given.get("format") or given
            raise refused(f"{key} {what if isinstance(what, str) else said(what)}")
    groups = section(raw, "config_groups")
    kinds_of = {name: _kind(name, group, raw) for name, group in groups.items()}
    each = [(entry, kind) for name, kind in kinds_of.items() for entry in _targets(groups[name])]
    kinds = {kind for _, kind in each}
    if len(kinds) == 1:
        return replace(kinds.pop(), ignored=ignored_modules(raw))
    packed = [(entry, kind) for entry, kind in each if isinstance(kind, PackedConfig)]
    if not each or len(packed) < len(each):
        raise refused(f"compressed-tensors with {len(kinds)} kinds of config_groups")
    named_first = sorted(packed, key=lambda one: _last(one[0]))
    formats = tuple(("" if entry in _CLASSES else entry, kind) for entry, kind in named_first)
    return MixedConfig(formats, ignored=ignored_modules(raw))


def _targets(group: Raw) -> list[str]:
    """The entries that name the modules of a group: a class of them is all that no other group names."""
    return entries("targets", group.get("targets") or list(_CLASSES))


def _last(entry: str) -> int:
    """The place of an entry in the order of search: names, patterns, classes."""
    return 2 if entry in _CLASSES else int(entry.startswith("re:"))


def _kind(name: str, group: Any, raw: Raw) -> QuantizedConfig:
    """The format of a group of modules."""
    if not isinstance(group, Mapping):
        raise refused(f"{name} of config_groups as {said(group)}")
    if group.get("output_activations"):
        raise refused(f"output_activations of {name}")
    weights = section(group, "weights")
    form = group.get("format") or raw.get("format") or "pack-quantized"
    if not isinstance(form, str):
        raise refused(f"format {said(form)}")
    if weights.get("type") == "int":
        return _integers(name, weights, form, section(group, "input_activations"))
    if form in _FP4:
        return _fp4(name, weights, form)
    kind = _floats(name, weights, section(group, "input_activations"))
    for each in (raw.get("format"), group.get("format")):
        if each is not None and each not in _FLOAT_FORMATS:
            raise refused(f"format {each if isinstance(each, str) else said(each)}")
    return kind


def _integers(name: str, weights: Raw, form: str, rows: Raw) -> IntegerConfig:
    what = f"weights of {name}"
    if form not in _INTEGERS:
        raise refused(f"format {form}")
    strategy, order = weights.get("strategy"), weights.get("actorder")
    bits = bits_of(weights, what, BITS, "num_bits")
    if strategy not in ("tensor", "channel", "group") or weights.get("dynamic"):
        raise refused(f"int{bits} {what} by {said(strategy)}")
    if order not in (None, False, True, "weight", "static", "group", "dynamic"):
        raise refused(f"{what} with actorder {said(order)}")
    group = group_of(weights, what) if strategy == "group" else 0
    return _INTEGERS[form](
        bits,
        group,
        symmetric=switch(weights, "symmetric", True),
        whole=strategy == "tensor",
        by_activations=order in (True, "group", "dynamic"),
        rounds_rows=bool(rows),
    )


def _fp4(name: str, weights: Raw, form: str) -> PackedConfig:
    kind, size = _FP4[form]
    given = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if given != (4, "float", size) or not weights.get("symmetric", True) or weights.get("dynamic"):
        raise refused(f"{form} with weights of {name} {said(dict(weights))}")
    return kind(4, size)


def _floats(name: str, weights: Raw, rows: Raw) -> Fp8Config:
    strategy = _strategy(f"weights of {name}", weights, {"block": [FP8_SIDE, FP8_SIDE]})
    if strategy not in ("tensor", "channel", "block") or weights.get("dynamic"):
        raise refused(f"weights of {name} by {strategy}")
    if not rows:
        return Fp8Config(strategy)
    each = _strategy(f"input_activations of {name}", rows, {"group": FP8_SIDE})
    known: dict[tuple[str, bool, bool], RowScales] = {
        ("token", True, False): "token",
        ("tensor", True, False): "token",  # one for all rows of a step would tie a row to its company
        ("tensor", False, False): "tensor",
        ("group", True, True): "block",
    }
    how = each, bool(rows.get("dynamic")), strategy == "block"
    if how not in known:
        when = "dynamic" if how[1] else "static"
        raise refused(f"{when} input_activations of {name} by {each}, with weights by {strategy},")
    return Fp8Config(strategy, rows=known[how])


def _strategy(what: str, raw: Raw, sizes: Mapping[str, Any]) -> Any:
    """Reads the strategy of numbers that are stored in FP8, symmetrically.

    `sizes`: of the strategies that need one.
    """
    kind, bits = raw.get("type"), raw.get("num_bits")
    if (kind, bits) != ("float", 8):
        raise refused(f"{kind}{bits} {what}")
    if not raw.get("symmetric", True):
        raise refused(f"{what}, asymmetric,")
    strategy = raw.get("strategy") or "tensor"
    size = raw.get("block_structure" if strategy == "block" else "group_size")
    if strategy in sizes and size != sizes[strategy]:
        raise refused(f"{what} by {strategy} of {size}")
    return strategy
