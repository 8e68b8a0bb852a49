"""Tensors that a folder stores as one, and that models ask for one by one: rows of q, k and v, say.

Only the rows that are needed are read of a safetensors file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.quantized import FP8_SIDE

View = Callable[[Any], Any]
"""Makes a reader of a part of the reader of a stored tensor."""


@dataclass(frozen=True)
class FusedTensor:
    """`name`: a part of the stored name; `parts`: what stands there in the names that models use, and the
    rows of each in the stored matrix, from its first on.
    """

    name: str
    parts: tuple[tuple[str, int], ...]

    def holds(self, stored: str) -> bool:
        """True if that tensor is of this kind."""
        return f".{self.name}." in stored

    def split(self, stored: str, shape: tuple[int, ...]) -> Iterator[tuple[str, View | None]]:
        """The names of the parts of a stored tensor of that shape, and how each is read of it (None: as
        it is).

        Scales of rows or of blocks of rows lie as the matrix does; one scale is every part's. Raises
        ConfigError for a tensor that is of other rows.
        """
        counts = [count for _, count in self.parts]
        side = self._side(counts, shape)
        if side is None and math.prod(shape) != 1:
            whole = ", ".join(f"{count} of {name}" for name, count in self.parts)
            raise ConfigError(f"tensor {stored} is {shape}: rows cannot be {whole}")
        first = 0
        for name, count in self.parts:
            view = None
            if side is not None:
                view = partial(SomeRows, rows=slice(first // side, (first + count) // side))
            yield stored.replace(f".{self.name}.", f".{name}."), view
            first += count

    def _side(self, counts: list[int], shape: tuple[int, ...]) -> int | None:
        """The number of rows of the matrix that each row of the tensor stands for."""
        if shape and shape[0] == sum(counts):
            return 1
        blocks = all(count % FP8_SIDE == 0 for count in counts)
        return FP8_SIDE if blocks and shape and shape[0] * FP8_SIDE == sum(counts) else None


class SomeRows:
    """Some rows of a stored tensor, read as a safetensors file's slice is."""

    def __init__(self, stored: Any, rows: slice) -> None:
        self._stored, self._rows = stored, rows

    def get_dtype(self) -> str:
        """The dtype, by the file's name for it."""
        kind: str = self._stored.get_dtype()
        return kind

    def get_shape(self) -> list[int]:
        """The shape, with the number of rows selected."""
        return [self._rows.stop - self._rows.start, *self._stored.get_shape()[1:]]

    def __getitem__(self, part: Any) -> Any:
        return self._stored[self._there(part)]

    def numbers(self, part: Any = ()) -> Any:
        """The numbers of a packed matrix (`WidenedMatrix.numbers`)."""
        return self._stored.numbers(self._there(part))

    def _there(self, part: Any) -> tuple[Any, ...]:
        """A part of these rows, as one of the stored tensor."""
        first, *others = part if isinstance(part, tuple) and part else (slice(None),)
        start, stop, _ = first.indices(self._rows.stop - self._rows.start)
        here = slice(self._rows.start + start, self._rows.start + stop)
        return (here, *others)
