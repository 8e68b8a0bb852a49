"""How weights are stored that are not in 16 or 32 bits: what all formats have in common, and FP8 (e4m3).

What is not read is refused by name: numbers that are read as something that they are not answer fluently and
wrong. `eyas.engine.checkpoint.methods` has the reader of each `quant_method`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, Self

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.values import said

FP8_SIDE = 128
"""Rows, and columns, of a block of FP8 weights that has one scale; of a row, elements that have one."""

WeightScales = Literal["block", "channel", "tensor"]
RowScales = Literal["", "block", "token", "tensor"]
Raw = Mapping[str, Any]

QUANTIZED = ("quantization_config", "compression_config")
"""Where a config.json says it: beside what it says of a model's parts."""

_KNOWN = "FP8, GPTQ, AWQ, MXFP4, NVFP4, bitsandbytes, compressed-tensors are, as docs/models.md says"
_IGNORE_KEYS = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")


@dataclass(frozen=True)
class QuantizedConfig:
    """How weights are stored that are not in 16 or 32 bits. A format is a subclass of this.

    `kind`: what a safetensors file calls the dtype of a weight's numbers, where those alone say that it is
    quantized. `rows`: what of the rows that they multiply has one scale, when those are rounded like them:
    128 elements ("block"), a row ("token"), or all rows there are, by a stored number ("tensor"); "": rows
    are left as they are. `ignored`: modules that are not stored so, as the config.json names them.
    """

    kind: ClassVar[str] = ""
    rows: RowScales = dataclasses.field(default="", kw_only=True)
    ignored: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)

    def keeps(self, tensor: str) -> bool:
        """True if the module of this tensor, by its stored name, is not quantized."""
        module = tensor.removesuffix(".weight")
        return any(named(entry, module) for entry in self.ignored)

    def with_rows_as_they_are(self) -> Self:
        """A copy for the same weights that rounds no rows."""
        return dataclasses.replace(self, rows="")


@dataclass(frozen=True)
class ScaledConfig(QuantizedConfig):
    """A weight is stored under its name, as small numbers of its shape, and beside it scales: one for each
    block of 128 x 128, output row ("channel") or whole tensor. `dtype`: what torch calls that of the numbers.
    """

    dtype: ClassVar[str]
    weights: WeightScales


@dataclass(frozen=True)
class Fp8Config(ScaledConfig):
    """Weights in FP8 (e4m3). `powers`: scales of rows are powers of two."""

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


def read_fp8(raw: Raw) -> Fp8Config:
    """Reads `quant_method` fp8: with blocks (DeepSeek, Qwen), or with a scale for each tensor."""
    block, scheme = raw.get("weight_block_size"), raw.get("activation_scheme", "dynamic")
    powers, ignored = raw.get("scale_fmt") == "ue8m0", ignored_modules(raw)
    if (kind := raw.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise refused(f"FP8 of fmt {kind!r}")
    if scheme not in ("dynamic", "static"):
        raise refused(f"activation_scheme {scheme!r}")
    if not block:
        # A scale of all rows of a step would tie a row to its company: dynamic ones are each row's own.
        return Fp8Config("tensor", rows="token" if scheme == "dynamic" else "tensor", ignored=ignored)
    if block != [FP8_SIDE, FP8_SIDE] or scheme != "dynamic":
        raise refused(f"{scheme} FP8 with weight_block_size {block}")
    return Fp8Config("block", powers, rows="block", ignored=ignored)


def read_fbgemm(raw: Raw) -> Fp8Config:
    """Reads `quant_method` fbgemm_fp8: a scale for each row of a weight. `activation_scale_ub`, at which its
    own kernels cut off the elements of rows, is passed over: none is cut off.
    """
    return Fp8Config("channel", rows="token", ignored=ignored_modules(raw))


def ignored_modules(raw: Raw) -> tuple[str, ...]:
    """The modules that are not quantized, under any of the keys that name them."""
    return tuple(dict.fromkeys(entry for key in _IGNORE_KEYS for entry in entries(key, raw.get(key) or [])))


def entries(key: str, listed: Any) -> list[str]:
    """Checks a list of modules and gives its entries."""
    if not isinstance(listed, list):
        raise refused(f"{key} {said(listed)}, which is no list,")
    for entry in listed:
        if not isinstance(entry, str):
            raise refused(f"{key} with {said(entry)}, which is no name,")
        if entry.startswith("re:"):
            try:
                re.compile(entry[3:])
            except re.error as error:
                raise refused(f"{key} {entry!r}, which is no pattern ({error}),") from None
    return listed


def named(entry: str, module: str) -> bool:
    """True if an entry of a list of modules names this one.

    "re:" begins a pattern that a name begins with; other entries are a module, its last parts, or what it is
    in. "*" in one stands for anything.
    """
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    if "*" in entry:
        return fnmatchcase(module, entry) or fnmatchcase(module, f"{entry}.*")
    return f".{entry}." in f".{module}." and (module.startswith(entry) or module.endswith(entry))


def refused(what: str) -> ConfigError:
    """The error for what is not read, by its name."""
    return ConfigError(f"quantization_config: {what} is not supported ({_KNOWN})")
