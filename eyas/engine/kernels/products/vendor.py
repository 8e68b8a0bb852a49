"""Products in FP8 of many rows by cuBLAS and CUTLASS, through torch: on Hopper, of dense weights.

From some hundred rows on they take half the time of `grouped`'s tiles (docs/experiments.md), and they too add
up stretches of 128 of k in float32.
"""

from __future__ import annotations

import torch
from torch.nn.functional import ScalingType, scaled_mm
from triton.runtime import driver

from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.kernels.products.blocks import ALIGNED, MANY, Fp8Rows, StoredWeight

FEWEST = MANY
"""Rows: of fewer, tiles of our own are as fast."""

_STEP = 512  # of k: cuBLAS takes the scales of four blocks of a weight at a time
_SIDE = 16  # of what CUTLASS takes
_HOPPER = 90
_CUDA = (12, 9)  # cuBLAS has had products of blocks since


def is_there(device: str) -> bool:
    """True if the GPU in use ("meta": the one that kernels are compiled for) has these products."""
    version = torch.version.cuda
    if device == "cpu" or version is None or tuple(map(int, version.split("."))) < _CUDA:
        return False
    return bool(driver.active.get_current_target().arch == _HOPPER)


def takes(rows: int, dtype: torch.dtype, weight: StoredWeight) -> bool:
    """True if the weight is multiplied with as many rows, which give results in `dtype`, here."""
    if weight.rounding is None or rows < FEWEST or dtype != torch.bfloat16:
        return False
    n, k = weight.shape
    return n % _SIDE == 0 and k % (_STEP if weight.rounding.rows == "block" else _SIDE) == 0


def product(x: Fp8Rows, weight: StoredWeight) -> torch.Tensor:
    """x [m, k] . weight [n, k]^T -> bfloat16 [m, n]. x: all rows for which `blocks.room_for` made room."""
    assert weight.scales is not None and weight.rounding is not None
    m, k = x.stored.shape
    turned, by_block = weight.stored.t(), weight.rounding.rows == "block"
    if x.stored.is_meta:
        return x.stored.new_empty(m, weight.shape[0], dtype=x.dtype)
    if not by_block:
        both = x.scales[:, None], weight.scales[None, :]
        return torch._scaled_mm(x.stored, turned, *both, out_dtype=x.dtype)
    rows = cdiv(m, ALIGNED) * ALIGNED
    stored = x.stored.as_strided((rows, k), (k, 1))  # the last rows may be anything
    scales = x.turned
    if scales is None:  # tiles of our own made the rows
        scales = x.scales.new_empty(x.scales.shape[1], rows)
        scales[:, :m] = x.scales.t()
    kinds = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    given = scales.t(), kinds[0], weight.scales.t(), kinds[1]
    return scaled_mm(stored, turned, *given, output_dtype=x.dtype)[:m]
