"""A softmax that goes on from block to block of keys (FlashAttention, Dao et al. 2022), to the base 2."""

from __future__ import annotations

import triton
import triton.language as tl

from eyas.engine.kernels.launch.launching import INTERPRETED

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


@triton.jit
def settled(acc):
    """acc, a product's float32 sums, once they are there: at the head of a loop over blocks of keys.

    The product of queries and keys would begin while that of weights and values is in flight, and ptxas then
    has every instruction of the matrix unit wait for the one before it (its C7515).
    """
    if INTERPRETED:
        return acc
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=False, pack=1
    )
