"""Tensors whose products a model multiplies by stated numbers: they are multiplied as they are read, once.

So no step multiplies anything, and every format of the product behind them computes the model. A number is
rounded once more where the model's dtype is shorter than float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.fused_tensors import FusedTensor, SomeRows, View

_WIDE = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class MultipliedTensor:
    """`name`: a part of the stored name; `parts`: what stands there in the names that models use, the rows of
    each, from the first on, and the number that multiplies them.
    """

    name: str
    parts: tuple[tuple[str, int, float], ...]

    def holds(self, stored: str) -> bool:
        """True if that tensor is of this kind."""
        return f".{self.name}." in stored

    def split(self, stored: str, shape: tuple[int, ...]) -> Iterator[tuple[str, View | None]]:
        """See `FusedTensor.split`."""
        rows = FusedTensor(self.name, tuple((part, count) for part, count, _ in self.parts))
        for (name, view), (_, _, factor) in zip(rows.split(stored, shape), self.parts, strict=True):
            yield name, view if factor == 1.0 else partial(MultipliedRows, view=view, factor=factor)


class MultipliedRows:
    """Some rows of a stored tensor times a number, read as a safetensors file's slice is."""

    def __init__(self, stored: Any, view: View | None, factor: float) -> None:
        self._rows: SomeRows = stored if view is None else view(stored)
        self._factor = factor

    def get_dtype(self) -> str:
        """The dtype, by the file's name for it."""
        return self._rows.get_dtype()

    def get_shape(self) -> list[int]:
        """The shape of the part."""
        return self._rows.get_shape()

    def __getitem__(self, part: Any) -> Any:
        """float32. Raises ConfigError for numbers that mean nothing without their scales."""
        if self.get_dtype() not in _WIDE:
            raise ConfigError(f"weights in {self.get_dtype()} that a model multiplies are not supported")
        return self._rows[part].float() * self._factor

    def numbers(self, part: Any = ()) -> Any:
        """Raises ConfigError: a packed tensor of this kind is not read."""
        raise ConfigError("packed weights that a model multiplies are not supported")
