"""Tensors that a folder stores as one for all experts of a layer, and that models ask for one by one.

Only what is needed of an expert is read of a safetensors file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.fused_tensors import FusedTensor, View
from eyas.engine.checkpoint.multiplied_tensors import MultipliedTensor
from eyas.engine.checkpoint.transposed_tensors import GroupsTensor, TransposedTensor


@dataclass(frozen=True)
class StackedTensor:
    """`name`: the end of the stored name; `parts`: what stands behind an expert's number in the names that
    models use, for each of the matrices, or vectors, of an expert: one below the other, or with rows that
    take turns if `interleaved`. `transposed`: a matrix is stored as [columns, rows]. `columns`: where files
    of both kinds are known, a matrix that has as many rows as this is transposed (0: as `transposed` says).
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    columns: int = 0

    def holds(self, stored: str) -> bool:
        """True if that tensor is of this kind."""
        return stored.endswith(f".{self.name}")

    def split(self, stored: str, shape: tuple[int, ...]) -> Iterator[tuple[str, View]]:
        """The names of the parts of a stored tensor of that shape, and how each is read of it.

        Raises ConfigError for a tensor that has no such parts.
        """
        turned = self.transposed if not self.columns else shape[1:2] == (self.columns,)
        rows = shape[2 if turned else 1 :][:1]
        if not 2 <= len(shape) <= 3 or not rows or rows[0] % len(self.parts):
            parts = " and ".join(self.parts)
            raise ConfigError(f"tensor {stored} is {shape}: no {parts} of each expert")
        stem, kind = stored.removesuffix(self.name.rpartition(".")[2]), replace(self, transposed=turned)
        for expert in range(shape[0]):
            for number, part in enumerate(self.parts):
                yield f"{stem}{expert}.{part}", partial(ExpertPart, kind, expert, number)


@dataclass(frozen=True)
class RowTensor:
    """A vector that is stored as a matrix of one row. `name`: the end of the stored name."""

    name: str

    def holds(self, stored: str) -> bool:
        """True if that tensor is of this kind."""
        return stored.endswith(f".{self.name}")

    def split(self, stored: str, shape: tuple[int, ...]) -> Iterator[tuple[str, View]]:
        """The same name, and how it is read. Raises ConfigError for a tensor of more rows."""
        if len(shape) != 2 or shape[0] != 1:
            raise ConfigError(f"tensor {stored} is {shape}: no single row")
        yield stored, partial(ExpertPart, StackedTensor(self.name, (self.name,)), 0, 0)


JoinedTensor = FusedTensor | StackedTensor | RowTensor | TransposedTensor | GroupsTensor | MultipliedTensor
"""Kinds of tensors that models ask for by other names or shapes than they are stored in."""


class ExpertPart:
    """One expert's part of a stored tensor, read as a safetensors file's slice is."""

    def __init__(self, kind: StackedTensor, expert: int, number: int, stored: Any) -> None:
        """`number`: among the parts of `kind`. `stored`: the tensor's reader."""
        self._stored, self._expert, self._turned = stored, expert, kind.transposed
        sizes = list(stored.get_shape()[1:])
        *self._columns, rows = sizes if self._turned else sizes[::-1]
        self._rows = rows // len(kind.parts)
        self._step = len(kind.parts) if kind.interleaved else 1
        self._first = number if kind.interleaved else number * self._rows

    def get_dtype(self) -> str:
        """The dtype, by the file's name for it."""
        kind: str = self._stored.get_dtype()
        return kind

    def get_shape(self) -> list[int]:
        """The shape [rows, columns], or [rows]."""
        return [self._rows, *self._columns]

    def __getitem__(self, part: Any) -> Any:
        cut = self._stored[self._there(part)]
        return (cut.t() if self._turned else cut).contiguous()

    def numbers(self, part: Any = ()) -> Any:
        """The numbers of a packed tensor, as its own reader gives them."""
        return self._stored.numbers(self._there(part))

    def _there(self, part: Any) -> tuple[Any, ...]:
        """Where a part of it is in the stored tensor."""
        rows, *columns = part if isinstance(part, tuple) and part else (slice(None),)
        start, stop, _ = rows.indices(self._rows)
        first = self._first + start * self._step
        here = slice(first, max(first, first + (stop - start - 1) * self._step + 1), self._step)
        columns = columns or [slice(None)] * len(self._columns)
        return (self._expert, *((*columns, here) if self._turned else (here, *columns)))
