"""A softmax that goes on from block to block of keys (FlashAttention, Dao et al. 2022), to the base 2."""

from __future__ import annotations

import triton
import triton.language as tl

UNSEEN = tl.constexpr(-1.0e30)
"""Finite: what a query does not see then weighs nothing, wherever it stands."""


@triton.jit
def with_block(scores, v, scale, peak, total, acc):
    """The greatest scores [tile], the weights' sums [tile] and the weighted values [tile, dim] so far, with a
    block more: scores [tile, keys], not scaled yet, and values v [keys, dim].
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_peak[:, None])
    rescale = tl.exp2(peak - new_peak)
    total = total * rescale + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return new_peak, total, acc
