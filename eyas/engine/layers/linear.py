"""Matrix products whose rows do not depend on the company they keep.

A GEMM library picks its kernel, and so the order of additions, by the shape of the whole product. Here
every product has the same number of rows, so a row's bits depend on that row and the weight alone. Rows
that meet weights in FP8 are rounded as those say, each by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from eyas.engine.batch.blocks import ROWS, padded_rows
from eyas.engine.checkpoint.fp8 import Rounding
from eyas.engine.checkpoint.weights import Weights


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


class Linear:
    """x times weight [N, K] transposed, plus bias [N]; x is rounded first, if there is a rule for it.

    Where PyTorch has oneDNN the weight is kept in the layout that oneDNN likes for ROWS rows: at this size
    reading the weight is the whole cost, and it halves it. Elsewhere plain `mm` keeps the promise for weights
    whose sides are multiples of 16, as those of real models are (with 7 outputs MKL was seen to break it).
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, rounding: Rounding | None = None
    ) -> None:
        self._packed = torch.backends.mkldnn.is_available() and not weight.is_cuda
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS) if self._packed else weight.t()
        self._bias, self._rounding = bias, rounding

    @classmethod
    def load(cls, weights: Weights, name: str, shape: tuple[int, int]) -> Linear:
        """Of one tensor, without a bias."""
        return cls(weights.take(name, shape), rounding=weights.rounding([name]))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, K] -> [R, N], in GEMMs of ROWS rows each."""
        return in_blocks(self._product, x if self._rounding is None else self._rounding.rounded(x))

    def rows(self, picked: torch.Tensor) -> Linear:
        """The product with some rows of the weight alone: picked int64 [n] -> [R, n]."""
        weight = self._weight.to_dense() if self._packed else self._weight.t()
        return Linear(weight[picked], None if self._bias is None else self._bias[picked], self._rounding)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            fused: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return fused
        out = torch.mm(x, self._weight)
        return out if self._bias is None else out.add_(self._bias)
