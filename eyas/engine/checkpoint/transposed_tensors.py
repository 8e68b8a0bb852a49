"""Tensors that older models store otherwise than they are asked for: matrices as [columns, rows], and rows
of q, k and v by heads.

What is read of a safetensors file is the whole tensor, for each of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.fused_tensors import View
from eyas.engine.checkpoint.quantized import FP8_SIDE

Rows = Callable[[Any], Any]
"""Takes the rows of a part out of a stored tensor."""


@dataclass(frozen=True)
class TransposedTensor:
    """Matrices stored as [columns, rows], and their biases. `name`: a part of the stored name; `parts`: what
    stands there in the names that models use, and the rows of each, from the first on.
    """

    name: str
    parts: tuple[tuple[str, int], ...]

    def holds(self, stored: str) -> bool:
        """True if that tensor is of this kind."""
        return f".{self.name}." in stored

    def split(self, stored: str, shape: tuple[int, ...]) -> Iterator[tuple[str, View]]:
        """The names of the parts of a stored tensor of that shape, and how each is read of it.

        Raises ConfigError for a tensor that is of other rows.
        """
        if not shape or shape[-1] != sum(count for _, count in self.parts):
            whole = ", ".join(f"{count} of {name}" for name, count in self.parts)
            raise ConfigError(f"tensor {stored} is {shape}: its last dimension is not {whole}")
        first = 0
        for name, count in self.parts:
            sizes = (count, *shape[:-1])
            part = partial(ReorderedRows, sizes=sizes, rows=partial(_transposed, first=first, count=count))
            yield stored.replace(f".{self.name}.", f".{name}."), part
            first += count


@dataclass(frozen=True)
class GroupsTensor:
    """Rows by `groups` of heads: in each the rows of every part, one below the other. `name`: a part of the
    stored name; `parts`: what stands there in the names that models use, and the rows of each in a group. A
    bias beside the matrix lies as it does.
    """

    name: str
    groups: int
    parts: tuple[tuple[str, int], ...]

    def holds(self, stored: str) -> bool:
        """True if that tensor is of this kind."""
        return f".{self.name}." in stored

    def split(self, stored: str, shape: tuple[int, ...]) -> Iterator[tuple[str, View]]:
        """The names of the parts, and how each is read of a stored tensor of that shape. Scales of blocks of
        rows lie as the matrix does.

        Raises ConfigError for a tensor that is of other rows.
        """
        counts = [count for _, count in self.parts]
        if shape and shape[0] * FP8_SIDE == self.groups * sum(counts):
            counts = [count // FP8_SIDE for count in counts if count % FP8_SIDE == 0]
        each, first = sum(counts), 0
        if not shape or len(counts) != len(self.parts) or shape[0] != self.groups * each:
            whole = ", ".join(name for name, _ in self.parts)
            rows = self.groups * sum(count for _, count in self.parts)
            raise ConfigError(f"tensor {stored} is {shape}: it has not the {rows} rows of {whole}")
        for (name, _), count in zip(self.parts, counts, strict=True):
            sizes = (self.groups * count, *shape[1:])
            part = partial(_of_groups, sizes=(self.groups, each), first=first, count=count)
            yield (
                stored.replace(f".{self.name}.", f".{name}."),
                partial(ReorderedRows, sizes=sizes, rows=part),
            )
            first += count


class ReorderedRows:
    """Rows of a stored tensor in another order, read as a safetensors file's slice is."""

    def __init__(self, stored: Any, sizes: tuple[int, ...], rows: Rows) -> None:
        self._stored, self._sizes, self._rows = stored, sizes, rows

    def get_dtype(self) -> str:
        """The dtype, by the file's name for it."""
        kind: str = self._stored.get_dtype()
        return kind

    def get_shape(self) -> list[int]:
        """The shape of the part."""
        return list(self._sizes)

    def __getitem__(self, part: Any) -> Any:
        return self._rows(self._stored[:])[part].contiguous()

    def numbers(self, part: Any = ()) -> Any:
        """Raises ConfigError: a packed tensor of this kind is not read."""
        raise ConfigError("packed weights whose rows are stored in another order are not supported")


def _transposed(stored: Any, first: int, count: int) -> Any:
    rows = stored.t() if stored.dim() == 2 else stored
    return rows[first : first + count]


def _of_groups(stored: Any, sizes: tuple[int, int], first: int, count: int) -> Any:
    return stored.unflatten(0, sizes)[:, first : first + count].flatten(0, 1)
