"""Matrix products whose rows do not depend on the company they keep.

A GEMM library picks its kernel, and so the order of additions, by the shape of the whole product. Here
every product has the same number of rows, so a row's bits depend on that row and the weight alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROWS = 8
"""Rows of every GEMM: one row takes a different kernel, odd counts too, and 8 is what a verify step has."""


def padded_rows(rows: int) -> int:
    """The next multiple of ROWS."""
    return -(-rows // ROWS) * ROWS


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """x [R, ...] with zero rows appended up to a multiple of ROWS; x itself if there is nothing to add."""
    missing = padded_rows(x.shape[0]) - x.shape[0]
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def blocked_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [R, K] times weight [N, K] transposed, plus bias [N]: [R, N], in GEMMs of ROWS rows each."""
    rows = x.shape[0]
    x, columns = pad_rows(x), weight.t()
    if x.shape[0] == ROWS:
        out = torch.mm(x, columns)
    else:
        out = x.new_empty(x.shape[0], weight.shape[0])
        for i in range(0, x.shape[0], ROWS):
            torch.mm(x[i : i + ROWS], columns, out=out[i : i + ROWS])
    if bias is not None:
        out += bias
    return out[:rows]
