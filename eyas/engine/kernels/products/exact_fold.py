"""Products of many rows with the bits of the narrow ones, where cuBLAS adds up in another order.

One program computes a tile and folds k from its beginning to its end into one accumulator, by as many steps
as it takes: by the matrix unit's rule no bit depends on the tile. It is slower than cuBLAS.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import cdiv

_ROWS, _COLUMNS, _DEPTH = 128, 128, 64  # of a tile, and of k at a time
_GROUP = 8  # tiles of rows that pass over the same columns of the weight while L2 holds them


def fold_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    dtype: torch.dtype,
    compile_only: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [m, k] . weight [n, k]^T -> [m, n], both with rows of any stride; rounded once to `dtype`; in `out`,
    if it is given.

    k is a multiple of 16. compile_only: the kernel is compiled and not run.
    """
    (m, k), n = x.shape, weight.shape[0]
    depth = math.gcd(k, _DEPTH)
    if out is None:
        out = x.new_empty(m, n, dtype=dtype)
    tiles = cdiv(m, _ROWS), cdiv(n, _COLUMNS)
    args = (_blocks(x, _ROWS, depth), _blocks(weight, _COLUMNS, depth), out, m, n, k)
    sizes = {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "DEPTH": depth, "GROUP": _GROUP}
    options = {"num_warps": 8, "num_stages": 4, "enable_fp_fusion": False}
    if compile_only:
        _fold.warmup(*args, **sizes, grid=(tiles[0] * tiles[1],), **options)
    else:
        _fold[(tiles[0] * tiles[1],)](*args, **sizes, **options)
    return out


def _blocks(matrix: torch.Tensor, rows: int, depth: int) -> TensorDescriptor:
    """A matrix by blocks; beyond its rows there are zeros."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, depth])


@kernel(do_not_specialize=["m", "n", "k"])
def _fold(
    x, weight, out, m, n, k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile; neighbours in the grid share columns of the weight."""
    tall, wide = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    band = tl.program_id(0) // (GROUP * wide) * GROUP
    height = tl.minimum(tall - band, GROUP)
    place = tl.program_id(0) % (GROUP * wide)
    first_row, first_column = (band + place % height) * ROWS, place // height * COLUMNS
    acc = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for at in range(0, k, DEPTH):
        rows = x.load([first_row, at])
        acc = tl.dot(rows, weight.load([first_column, at]).T, acc, input_precision="ieee")
    row = first_row + tl.arange(0, ROWS)[:, None]
    column = first_column + tl.arange(0, COLUMNS)[None, :]
    place = out + row.to(tl.int64) * n + column
    tl.store(place, acc.to(out.dtype.element_ty), mask=(row < m) & (column < n))
