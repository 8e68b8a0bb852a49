"""The rotation of heads and the store of rows in the pool, compiled into every kernel that does both.

Element i of a head is rotated with i + half, in float32. A row of the pool has its page's place and its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eyas.engine.kernels.products.blocks import LARGEST


@triton.jit
def rotated(low, high, cos, sin):
    """Both halves of heads, rotated."""
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def pool_row(layer, place, page_stride, PAGE: tl.constexpr, WIDTH: tl.constexpr):
    """The address of the row at `place` in a layer: its latent, or its keys, of WIDTH elements."""
    return layer + place // PAGE * page_stride + place % PAGE * WIDTH


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
