"""Reads from a config.json that weights are stored in FP8 (e4m3), or in a format that is refused.

Three ways of writing stand behind one dataclass: `quant_method` fp8 with blocks (DeepSeek, Qwen), fp8 without
(a scale for each tensor), and compressed-tensors. Everything else is refused by name: numbers that are read
as something that they are not answer fluently and wrong.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from eyas.common.errors import ConfigError

FP8_SIDE = 128
"""Rows, and columns, of a block of FP8 weights that has one scale; of a row, elements that have one."""

WeightScales = Literal["block", "channel", "tensor"]
RowScales = Literal["", "block", "token", "tensor"]
Raw = Mapping[str, Any]

QUANTIZED = ("quantization_config", "compression_config")
"""Where a config.json says it: beside what it says of a model's parts."""

_KNOWN = "FP8 weights with a scale for each tensor, output channel or block of 128 x 128 are"
_IGNORE_KEYS = ("ignore", "ignored_layers", "modules_to_not_convert")


@dataclass(frozen=True)
class QuantizedConfig:
    """Weights stored as small numbers times scales: one for each block of 128 x 128, output row ("channel")
    or whole tensor. A format is a subclass of this.

    `kind`: what a safetensors file calls the dtype of the numbers; `dtype`: what torch does. `rows`: what of
    the rows that they multiply has one scale, when those are rounded like them: 128 elements ("block"), a row
    ("token"), or all rows there are, by a stored number ("tensor"); "": rows are left as they are. `ignored`:
    modules that are not stored so, as the config.json names them.
    """

    kind: ClassVar[str]
    dtype: ClassVar[str]
    weights: WeightScales
    rows: RowScales = ""
    ignored: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)

    def keeps(self, tensor: str) -> bool:
        """True if the module of this tensor, by its stored name, is not quantized.

        "re:" begins a pattern that a name begins with; other entries are a module, its last parts, or what it
        is in.
        """
        module = tensor.removesuffix(".weight")
        return any(_named(entry, module) for entry in self.ignored)

    def with_rows_as_they_are(self) -> Self:
        """A copy for the same weights that rounds no rows."""
        return dataclasses.replace(self, rows="")


@dataclass(frozen=True)
class Fp8Config(QuantizedConfig):
    """Weights stored in FP8 (e4m3). `powers`: scales of rows are powers of two."""

    kind: ClassVar[str] = "F8_E4M3"
    dtype: ClassVar[str] = "float8_e4m3fn"
    powers: bool = False

    def with_rows_as_they_are(self) -> Self:
        return dataclasses.replace(self, rows="", powers=False)

    def __str__(self) -> str:
        each = {"block": "block of 128 x 128", "channel": "output channel", "tensor": "tensor"}[self.weights]
        rows = {
            "": "rows as they are",
            "block": "rows by 128 elements" + (" and powers of two" if self.powers else ""),
            "token": "rows by token",
            "tensor": "rows by a stored scale",
        }[self.rows]
        return f"FP8 by {each}, {rows}"


def read_quantized(raw: Raw) -> QuantizedConfig | None:
    """Reads the quantization; None: weights are stored in 16 or 32 bits. Scales of an FP8 KV cache are
    ignored: the cache has the model's type here, and scaled FP8 numbers approximate that.

    Raises ConfigError, which names the kind, for weights that are stored in any other way.
    """
    quantization = next((quantization for name in QUANTIZED if (quantization := raw.get(name))), None)
    if not quantization:
        return None
    if not isinstance(quantization, Mapping):
        raise _refused(repr(quantization))
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise _refused(f"quant_method {method!r}")
    return METHODS[method](quantization)


def _fp8(raw: Raw) -> Fp8Config:
    block, scheme = raw.get("weight_block_size"), raw.get("activation_scheme", "dynamic")
    powers, ignored = raw.get("scale_fmt") == "ue8m0", _ignored(raw)
    if (kind := raw.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _refused(f"FP8 of fmt {kind!r}")
    if scheme not in ("dynamic", "static"):
        raise _refused(f"activation_scheme {scheme!r}")
    if not block:
        # A scale of all rows of a step would tie a row to its company: dynamic ones are each row's own.
        return Fp8Config("tensor", "token" if scheme == "dynamic" else "tensor", ignored=ignored)
    if block != [FP8_SIDE, FP8_SIDE] or scheme != "dynamic":
        raise _refused(f"{scheme} FP8 with weight_block_size {block}")
    return Fp8Config("block", "block", powers, ignored=ignored)


def _compressed(raw: Raw) -> Fp8Config:
    """Groups may name different modules, never different kinds."""
    for key in ("sparsity_config", "transform_config"):
        if (given := raw.get(key)) and given.get("format") != "dense":
            raise _refused(f"{key} {given.get('sparsity_structure') or given.get('format') or given}")
    groups = raw.get("config_groups") or {}
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise _refused(f"{name} of config_groups as {group!r}")
    formats = {raw.get("format"), *(group.get("format") for group in groups.values())} - {None}
    kinds = {_group(name, group) for name, group in groups.items()}
    if others := formats - {"float-quantized", "naive-quantized"}:
        raise _refused(f"format {', '.join(sorted(others))}")
    if len(kinds) != 1:
        raise _refused(f"compressed-tensors with {len(kinds)} kinds of config_groups")
    ((weights, rows),) = kinds
    return Fp8Config(weights, rows, ignored=_ignored(raw))


def _group(name: str, group: Raw) -> tuple[WeightScales, RowScales]:
    weights, rows = group.get("weights") or {}, group.get("input_activations")
    if group.get("output_activations"):
        raise _refused(f"output_activations of {name}")
    strategy = _strategy(f"weights of {name}", weights, {"block": [FP8_SIDE, FP8_SIDE]})
    if strategy not in ("tensor", "channel", "block") or weights.get("dynamic"):
        raise _refused(f"weights of {name} by {strategy}")
    if not rows:
        return strategy, ""
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
        raise _refused(f"{when} input_activations of {name} by {each}, with weights by {strategy},")
    return strategy, known[how]


def _strategy(what: str, raw: Raw, sizes: Mapping[str, Any]) -> Any:
    """Reads the strategy of numbers that are stored in FP8, symmetrically.

    `sizes`: of the strategies that need one.
    """
    kind, bits = raw.get("type"), raw.get("num_bits")
    if (kind, bits) != ("float", 8):
        raise _refused(f"{kind}{bits} {what}")
    if not raw.get("symmetric", True):
        raise _refused(f"{what}, asymmetric,")
    strategy = raw.get("strategy") or "tensor"
    size = raw.get("block_structure" if strategy == "block" else "group_size")
    if strategy in sizes and size != sizes[strategy]:
        raise _refused(f"{what} by {strategy} of {size}")
    return strategy


def _ignored(raw: Raw) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entry for key in _IGNORE_KEYS for entry in _entries(key, raw.get(key) or [])))


def _entries(key: str, listed: Any) -> list[str]:
    """Checks a list of modules and gives its entries."""
    if not isinstance(listed, list):
        raise _refused(f"{key} {listed!r}, which is no list,")
    for entry in listed:
        if entry.startswith("re:"):
            try:
                re.compile(entry[3:])
            except re.error as error:
                raise _refused(f"{key} {entry!r}, which is no pattern ({error}),") from None
    return listed


def _named(entry: str, module: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    return f".{entry}." in f".{module}." and (module.startswith(entry) or module.endswith(entry))


def _refused(what: str) -> ConfigError:
    return ConfigError(f"quantization_config of config.json: {what} is not supported ({_KNOWN})")


METHODS: dict[str, Callable[[Raw], QuantizedConfig]] = {"fp8": _fp8, "compressed-tensors": _compressed}
"""By `quant_method`: what reads the rest."""
