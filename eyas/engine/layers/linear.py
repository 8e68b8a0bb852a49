"""Matrix products whose rows do not depend on the company they keep.

A GEMM library picks its kernel, and so the order of additions, by the shape of the whole product. Here
every product has the same number of rows, so a row's bits depend on that row and the weight alone. Rows
that meet weights in FP8 are rounded as those say, each by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F

from eyas.engine.batch.blocks import ROWS, padded_rows
from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import AnyProjection


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """x [R, ...] with zero rows appended up to a multiple of ROWS; x itself if there is nothing to add."""
    missing = padded_rows(x.shape[0]) - x.shape[0]
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def in_blocks(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`compute` ([ROWS, K] -> [ROWS, N]) applied to x [R, K] block by block: [R, N].

    On a GPU all rows at once: there the promise holds up to rounding, as the design says.
    """
    if x.shape[0] == ROWS or x.is_cuda:
        return compute(x)
    return torch.cat([compute(block) for block in pad_rows(x).split(ROWS)])[: x.shape[0]]


def per_head(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """x [R, heads, K] times each head's factor [heads, K, N] -> [R, heads, N], in products of one shape."""
    return in_blocks(lambda block: torch.bmm(block.transpose(0, 1), factors).transpose(0, 1), x)


class Linear(AnyProjection):
    """x times weight [N, K] transposed; x is rounded first, if there is a rule for it.

    Where PyTorch has oneDNN the weight is stored in the layout that oneDNN likes for ROWS rows: at this size
    reading the weight is the whole cost, and it halves it. Elsewhere plain `mm` keeps the promise for weights
    whose sides are multiples of 16, as those of real models are (with 7 outputs MKL was seen to break it).
    No gain goes into it: it would change bits.
    """

    matrix = None

    def __init__(self, weight: torch.Tensor, rounding: RowRounding | None = None) -> None:
        self._shape = weight.shape
        self._packed = torch.backends.mkldnn.is_available() and not weight.is_cuda
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS) if self._packed else weight.t()
        self._rounding = rounding

    @classmethod
    def load(cls, weights: WeightSource, name: str, shape: tuple[int, int]) -> Self:
        """One tensor's matrix."""
        return cls(weights.take(name, shape), weights.rounding([name]))

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def rounding(self) -> RowRounding | None:
        return self._rounding

    def folded(self, gain: torch.Tensor) -> torch.Tensor:
        return gain

    def room(self, count: int) -> Any:
        return LinearExperts(self, count)

    def put(self, place: int, part: Linear) -> None:
        raise TypeError("one matrix has room for no others")

    def tensors_at(self, place: int) -> list[torch.Tensor]:
        raise TypeError("one matrix has no places")

    def put_tensors(self, place: int, tensors: list[torch.Tensor]) -> None:
        raise TypeError("one matrix has no places")

    def below(self, lower: Self) -> Self:
        return type(self)(torch.cat((self._dense(), lower._dense())), self._rounding)

    def in_order(self, rows: torch.Tensor) -> Self:
        return type(self)(self._dense()[rows], self._rounding)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [R, K] -> [R, N], plus bias [N], in GEMMs of ROWS rows each."""
        read = x if self._rounding is None else self._rounding.rounded(x)
        return in_blocks(lambda block: self._product(block, bias), read)

    def _dense(self) -> torch.Tensor:
        """The weight [N, K] as it was."""
        return self._weight.to_dense() if self._packed else self._weight.t()

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._packed:
            fused: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")
            return fused
        out = torch.mm(x, self._weight)
        return out if bias is None else out.add_(bias)


class LinearExperts(Linear):
    """One matrix for each expert. `each`: in their order."""

    def __init__(self, like: Linear, count: int) -> None:
        self._shape, self._rounding = torch.Size((count, *like.shape)), like.rounding
        self.each = [like] * count

    def put(self, place: int, part: Linear) -> None:
        self.each[place] = part

    def tensors_at(self, place: int) -> list[torch.Tensor]:
        return [self.each[place]._dense().contiguous()]

    def put_tensors(self, place: int, tensors: list[torch.Tensor]) -> None:
        self.put(place, Linear(tensors[0], self.rounding))


@dataclass(frozen=True)
class LinearLoader:
    """A `ProjectionLoader` of products in blocks. Other formats are widened as they are read."""

    weights: WeightSource
    rounding: RowRounding | None

    @classmethod
    def of(cls, weights: WeightSource, names: list[str]) -> Self:
        """The loader, for any tensors."""
        return cls(weights, weights.rounding(names))

    def rows(self, names: list[str], rows: list[int], columns: int) -> Linear:
        """Every row, as of `ProjectionLoader`."""
        return Linear(self.weights.stack_rows(names, rows, columns), self.rounding)

    def columns(self, name: str, shape: tuple[int, int]) -> Linear:
        """Every column, as of `ProjectionLoader`."""
        return Linear(self.weights.take_columns(name, shape), self.rounding)

    def whole(self, name: str, shape: tuple[int, int]) -> Linear:
        """The whole matrix, as of `ProjectionLoader`."""
        return Linear(self.weights.take(name, shape), self.rounding)
