"""The rotation of heads and the store of rows in the pool, compiled into every kernel that does both.

Element i of a head is rotated with i + half, in float32. A row of the pool has its page's place and its own.
Keys and values in FP8 have scales, as `eyas.engine.kv.scaled` says.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eyas.engine.kernels.products.blocks import LARGEST

_LEAST = tl.constexpr(1e-30)  # of a row's largest: a row of zeros has a scale too


@triton.jit
def rotated(low, high, cos, sin):
    """Both halves of heads, rotated."""
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def pool_row(layer, place, page_stride, PAGE: tl.constexpr, WIDTH: tl.constexpr):
    """The address of the row at `place` in a layer: its latent, or its keys, of WIDTH elements."""
    return layer + place // PAGE * page_stride + place % PAGE * WIDTH


@triton.jit
def pool_scale(
    layer, place, field, head, page_stride, PAGE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """The address of the scale of a head's key (field 0) or value (1) at `place` in a layer of FP8."""
    number, EACH = field * PAGE + place % PAGE, DIM // 4
    behind = (2 * PAGE + number // EACH) * (KV_HEADS * DIM) + head * DIM
    return layer.to(tl.pointer_type(tl.float32)) + (place // PAGE * page_stride + behind) // 4 + number % EACH


@triton.jit
def store_scaled(to, scales, low, high, mask, real, HALF: tl.constexpr):
    """Halves [n, half] of whole heads, in the type of where they go; in FP8 with their scales, where `real`
    [n].
    """
    if to.dtype.element_ty == tl.float8e4nv:
        largest = tl.maximum(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1), _LEAST)
        scale = tl.div_rn(largest, tl.zeros_like(largest) + LARGEST)
        tl.store(scales, scale, mask=real)
        divisor = tl.zeros_like(low) + scale[:, None]
        low, high = tl.div_rn(low, divisor), tl.div_rn(high, divisor)
    store_halves(to, low, high, mask, HALF)


@triton.jit
def store_halves(to, low, high, mask, HALF: tl.constexpr):
    """Halves of heads, in the type of where they go."""
    store_rounded(to, low, mask)
    store_rounded(to + HALF, high, mask)


@triton.jit
def store_rounded(to, values, mask):
    """Stores values in the dtype of `to`; in FP8 values beyond its largest number become that."""
    if to.dtype.element_ty == tl.float8e4nv:
        values = tl.clamp(values, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(to, values.to(to.dtype.element_ty), mask=mask)
