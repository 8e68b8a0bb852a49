"""Triton's interpreter with a matrix unit that adds as Hopper's does, so that orders of addition show.

The interpreter's own dot is numpy's, whose order follows the shapes. Hopper's is one left fold over k in
groups of 16: d = c plus 16 exact products, all shifted to the greatest exponent among them, cut towards zero
at 25 fractional bits, added exactly, and the sum cut to float32 (a model: "MMA-Sim", arXiv 2511.10909, which
agreed with the hardware in over a million cases; not its maker's word). By it neither the tile's shape nor
the steps of k change a bit; a cut of k does. Of FP8 a group has 32, and 13 bits are kept behind the point.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

GROUP, GROUP_FP8 = 16, 32  # products that meet in one step
FRACTION, FRACTION_FP8 = 25, 13  # bits behind the point, of the greatest term


def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray, fp8: bool = False) -> np.ndarray:
    """a [m, k] . b [k, n] + c float32 [m, n], a and b of 16 bits, or numbers of FP8: float32 [m, n]."""
    group, fraction = (GROUP_FP8, FRACTION_FP8) if fp8 else (GROUP, FRACTION)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    for k in range(0, a.shape[1], group):
        products = wide_a[:, k : k + group, None] * wide_b[None, k : k + group]
        c = fused_sum(np.concatenate((products, c[:, None].astype(np.float64)), axis=1), fraction)
    return c


def fused_sum(terms: np.ndarray, fraction: int) -> np.ndarray:
    """terms float64 [m, n, ...], added up over n: float32."""
    _, exponents = np.frexp(terms)
    greatest = np.where(terms == 0, -200, exponents).max(axis=1)
    unit = greatest - 1 - fraction
    cut = np.trunc(np.ldexp(terms, -unit[:, None]))
    return towards_zero(np.ldexp(cut.sum(axis=1), unit))


def towards_zero(wide: np.ndarray) -> np.ndarray:
    """float64 -> float32, cut rather than rounded."""
    near = wide.astype(np.float32)
    beyond = np.abs(near.astype(np.float64)) > np.abs(wide)
    return np.where(beyond, np.nextafter(near, np.float32(0)), near)


def matmul(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x . weight^T as an unsplit product of cuBLAS is expected to add it up."""
    zeros = np.zeros((len(x), len(weight)), np.float32)
    return torch.from_numpy(multiply_add(x.numpy(), weight.numpy().T, zeros)).to(dtype)


def _numbers(stored: Any) -> np.ndarray:
    """Of e4m3 as the interpreter holds it, in a type that has them all."""
    return interpreter._convert_float(stored.data, stored.dtype.scalar, tl.float16, None).view(np.float16)


def left_fold(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The same of float32, which the matrix unit does not take: one step of k after the other."""
    for k in range(a.shape[1]):
        c = c + a[:, k, None] * b[k]
    return c


@contextmanager
def hopper(folds: bool = False) -> Iterator[None]:
    """Dots of 8 and 16 bits are the matrix unit's; those of float32 stay numpy's, or are `folds`."""
    numpys = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        fp8 = a.dtype.scalar == tl.float8e4nv
        if a.data.dtype == np.float32 and folds:
            return interpreter.TensorHandle(left_fold(a.data, b.data, d.data), d.dtype.scalar)
        if a.data.dtype != np.float16 and not fp8:
            return numpys(builder, a, b, d, *how)
        operands = (_numbers(a), _numbers(b)) if fp8 else (a.data, b.data)
        with np.errstate(all="ignore"):  # rows of the padding may hold anything
            made = multiply_add(*operands, d.data, fp8)
        return interpreter.TensorHandle(made, d.dtype.scalar)

    with patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot):
        yield
