"""The keys and values of one of `attend`'s programs, in FP8: nothing stored is multiplied by a scale.

A key's scale is a factor of its scores, a value's of its weights, which the sum of weights leaves out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eyas.engine.kernels.attention.attend_masks import lowest_of, masked
from eyas.engine.kernels.attention.e4m3 import in_units, key_part, lifted, query_parts, value_part, weighed
from eyas.engine.kernels.attention.paged import block_pages, read_words, scales_of
from eyas.engine.kernels.attention.scores import tanh
from eyas.engine.kernels.attention.softmax import UNSEEN


@triton.jit
def over_scaled_part(
    q_tile, sees, keys, head, table, start, low, edge, first, last, scale, layout: tl.constexpr
):  # fmt: skip
    """As `attend._over_part`; keys points at the pool's first row, of all heads."""
    HALF: tl.constexpr = layout.dim // 2
    q_small, unit = in_units(q_tile)
    unit *= scale
    q_first, q_second = query_parts(q_small)
    words = keys.to(tl.pointer_type(tl.uint16)) + head * HALF + tl.arange(0, HALF)[None, :]
    scales = scales_of(keys, head, layout)
    peak = tl.full([layout.tile], UNSEEN, tl.float32)
    total = tl.full([layout.tile], 0.0, tl.float32)
    even = tl.full([layout.tile, HALF], 0.0, tl.float32)
    odd = tl.full([layout.tile, HALF], 0.0, tl.float32)
    lowest = lowest_of(sees, start, low, edge, layout)
    pages = block_pages(table, first, last, layout)
    for block in range(first, last, layout.keys):
        row = block + tl.arange(0, layout.keys)
        inside = row < last
        k, v, key_scale, value_scale = read_words(words, scales, pages, layout)
        pages = block_pages(table, block + layout.keys, last, layout)  # ahead of the rows they lead to
        scores = tl.dot(q_first, tl.trans(key_part(k, 0, q_small)), input_precision="ieee")
        scores = tl.dot(q_second, tl.trans(key_part(k, 1, q_small)), scores, input_precision="ieee")
        scores *= key_scale[None, :]
        factor = unit
        if layout.ceiling > 0:
            scores = tanh(scores * unit[:, None]) * layout.ceiling
            factor = tl.full([layout.tile], 1.0, tl.float32)
        if layout.narrow or block + layout.keys > start:
            if layout.narrow:
                inside = inside & (row >= low)
            scores = masked(scores, row, inside, sees, lowest, start, block, layout)
            value_scale = tl.where(inside, value_scale, 0.0)
        new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor[:, None] - new_peak[:, None])
        rescale = tl.exp2(peak - new_peak)
        total = total * rescale + tl.sum(weights, 1)
        small = weighed(weights, value_scale, q_small)
        even = tl.dot(small, value_part(v, 0, small), even * rescale[:, None], input_precision="ieee")
        odd = tl.dot(small, value_part(v, 1, small), odd * rescale[:, None], input_precision="ieee")
        peak = new_peak
    acc = lifted(tl.reshape(tl.join(even, odd), (layout.tile, layout.dim)))
    return acc / total[:, None], peak + tl.log2(total)
