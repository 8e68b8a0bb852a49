"""The convolution along a row's path, silu, and the norm of queries and keys: what stands before the rule."""

from __future__ import annotations

import triton
import triton.language as tl

from eyas.engine.kernels.products.halving import halving_sum
from eyas.engine.states.delta import EPS as _EPS

EPS = tl.constexpr(_EPS)


@triton.jit
def numbers_back(number, real, before, start, layout: tl.constexpr):
    """A tuple of the numbers [rows] that the convolution reads: the rows' own, and those before on a path.

    before: points at the forward's row `start`; only trees read it.
    """
    KERNEL: tl.constexpr = layout.kernel
    numbers = (number,)
    for back in tl.static_range(1, KERNEL):
        last = numbers[back - 1]
        if layout.tree:
            here = real & (last >= start)
            known = tl.load(before + last - start, mask=here, other=0)
            numbers = numbers + (tl.where(here, known, last - 1),)  # type: ignore[assignment]
        else:
            numbers = numbers + (last - 1,)  # type: ignore[assignment]
    return numbers


@triton.jit
def inputs_at(
    number, real, column, inputs, stride, origin, start, ring, tails, bound,
    layout: tl.constexpr, EARLIER: tl.constexpr,
):  # fmt: skip
    """The convolution's inputs of rows `number` [rows] in columns [n]: of the forward, of the slot's ring
    below `start`, and of its tail below `bound`; those that are `real` [rows, n]. `inputs` points at row
    `origin`. EARLIER: a row may be below `start`.
    """
    column = column[None, :]
    number = number[:, None]
    if EARLIER:
        x = tl.load(inputs + (number - origin) * stride + column, mask=real & (number >= start), other=0.0)
        kept = real & (number < start) & (number >= bound)
        at_ring = ring + number % layout.ring * layout.inputs
        x += tl.load(at_ring + column, mask=kept, other=0.0)  # one of the three is not zero
        old = real & (number < bound) & (bound > 0)
        at_tail = tails + (number - bound + layout.kernel - 1) * layout.inputs
        x += tl.load(at_tail + column, mask=old, other=0.0)
    else:
        x = tl.load(inputs + (number - origin) * stride + column, mask=real, other=0.0)
    return x.to(tl.float32)


@triton.jit
def convolved(
    numbers, real, column, there, filters, bias, inputs, stride, origin, start, ring, tails, bound,
    layout: tl.constexpr, EARLIER: tl.constexpr,
):  # fmt: skip
    """silu of the convolution of columns [n], as far as they are `there`, along the rows' paths, float32
    [rows, n]; the oldest first. EARLIER: a path may begin below `start`.
    """
    KERNEL: tl.constexpr = layout.kernel
    acc = tl.full((real.shape[0], column.shape[0]), 0.0, tl.float32)
    real = real[:, None] & there[None, :]
    for tap in tl.static_range(KERNEL):
        x = inputs_at(
            numbers[KERNEL - 1 - tap], real, column, inputs, stride, origin, start, ring, tails, bound,
            layout, EARLIER,
        )  # fmt: skip
        factor = tl.load(filters + tap * layout.inputs + column, mask=there, other=0.0)
        acc = tl.fma(x, tl.broadcast_to(factor[None, :], x.shape), acc)
    return passed_silu(acc, column, there, bias, layout)


@triton.jit
def passed_silu(acc, column, there, bias, layout: tl.constexpr):
    """silu of columns [n] of sums [rows, n], with their bias."""
    if layout.bias:
        acc += tl.load(bias + column, mask=there, other=0.0)[None, :]
    root = tl.rsqrt(1.0 + tl.exp(-acc))  # a division takes ten instructions
    return acc * (root * root)


@triton.jit
def key_rows(x, layout: tl.constexpr):
    """Queries or keys x [rows, n] as the rule reads them."""
    return normed(x) if layout.corrects else x


@triton.jit
def normed(x):
    """Heads x [rows, n] over the root of the sum of their squares."""
    return x * tl.rsqrt(halving_sum(x * x) + EPS)[:, None]
