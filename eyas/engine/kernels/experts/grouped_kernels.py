"""The device side of `grouped`: one kernel, which walks tiles.

Each tile is one story: find the expert and the rows, multiply stretch by stretch, add up what programs that
share the tile left, and finish it in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eyas.engine.kernels.experts.grouped_tiles import SHORT
from eyas.engine.kernels.launch.launching import call_ahead, kernel
from eyas.engine.kernels.products.activation import passed, with_bias
from eyas.engine.kernels.products.blocks import norm_factor, quantised

_MOST_STEPS = tl.constexpr(SHORT)


@kernel(do_not_specialize=["choices", "most"])
def product_kernel(
    x, x_scales, squares, weights, stored, scales, bias, out, out_scales, order, blocks, partials,
    tickets, choices, most, eps,
    N: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SPLIT: tl.constexpr, FOLDS: tl.constexpr, GROUP: tl.constexpr,
    PER_ROW: tl.constexpr, SCATTER: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    CLAMPED: tl.constexpr, BLOCKS: tl.constexpr, CHANNELS: tl.constexpr, POWERS: tl.constexpr,
    MADE: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr, LINES: tl.constexpr, EXPERTS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """One tile after the other; blocks that are absent cost nothing. Without an order `blocks` are the
    experts of one row, a block each. `squares`, of a dense product: `blocks.RowSquares`.
    """
    TILES: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    if PDL:
        if LINES > 0:
            _call_ahead(
                stored, order, blocks, choices, most,
                N, K, OUTPUTS, ROWS, COLUMNS, SPLIT, GROUP, GATED, LINES, EXPERTS,
            )  # fmt: skip
        gdc_wait()
        gdc_launch_dependents()  # not before: so `down` knows the order of the experts when it calls ahead
    if blocks is None:
        count = (choices + ROWS - 1) // ROWS
    elif order is None:
        count = choices
    else:
        count = tl.load(blocks + 3 * most)
    for cell in range(tl.program_id(0), count * TILES, tl.num_programs(0)):
        _one_tile(
            x, x_scales, squares, weights, scales, bias, out, out_scales, order, blocks, partials,
            tickets, choices, most, eps, cell, count, N, K, OUTPUTS, ROWS, COLUMNS, DEPTH, SPLIT, FOLDS,
            GROUP, PER_ROW, SCATTER, GATED, GELU, CLAMPED, BLOCKS, CHANNELS, POWERS, MADE, PARTS, TOGETHER,
        )  # fmt: skip


@triton.jit
def _call_ahead(
    stored, order, blocks, choices, most,
    N: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr, LINES: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The first lines of the weight rows that this program reads first.

    What `blocks` says may be old, or anything: it must lead to a weight that exists, and is read past L1
    (volatile), which must not keep it until it is read again after the wait.
    """
    EACH: tl.constexpr = 128 // (stored.dtype.element_ty.primitive_bitwidth // 8)
    TILES: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    cell = tl.program_id(0)
    expert = 0
    if blocks is None:
        _, tile = where(cell, (choices + ROWS - 1) // ROWS, TILES, GROUP)
    else:
        count = choices
        if order is not None:
            count = tl.minimum(tl.maximum(tl.load(blocks + 3 * most, volatile=True), 1), most)
        block, tile = where(cell % (count * TILES), count, TILES, GROUP)
        expert = tl.minimum(tl.maximum(tl.load(blocks + block, volatile=True), 0), EXPERTS - 1)
    row = tl.minimum(tile * COLUMNS + tl.arange(0, COLUMNS), OUTPUTS - 1)
    at = tl.program_id(1) * (K // SPLIT) + tl.minimum(tl.arange(0, LINES) * EACH, K // SPLIT - 1)
    lines = stored + (expert * N + row).to(tl.int64)[:, None] * K + at[None, :]
    call_ahead(lines)
    if GATED:
        call_ahead(lines + OUTPUTS * K)


@triton.jit
def _one_tile(
    x, x_scales, squares, weights, scales, bias, out, out_scales, order, blocks, partials, tickets,
    choices, most, eps, cell, count,
    N: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SPLIT: tl.constexpr, FOLDS: tl.constexpr, GROUP: tl.constexpr,
    PER_ROW: tl.constexpr, SCATTER: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    CLAMPED: tl.constexpr, BLOCKS: tl.constexpr, CHANNELS: tl.constexpr, POWERS: tl.constexpr,
    MADE: tl.constexpr, PARTS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the result of one block of rows, or a part of its k."""
    block, tile = where(cell, count, (OUTPUTS + COLUMNS - 1) // COLUMNS, GROUP)
    expert, begin, end = _choices_of(order, blocks, block, choices, most, ROWS)
    inside, source, target = rows_at(order, begin, end, ROWS, PER_ROW, SCATTER)
    first = tile * COLUMNS
    a, b = _folded(
        x, x_scales, weights, scales, source, expert, first,
        N, K, OUTPUTS, ROWS, COLUMNS, DEPTH, SPLIT, FOLDS, GATED, BLOCKS, CHANNELS, TOGETHER,
    )  # fmt: skip
    last = True
    if SPLIT > 1:
        size: tl.constexpr = COLUMNS * ROWS * (2 if GATED else 1)
        shares = partials + cell * (SPLIT * size)
        shares += tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(shares + tl.program_id(1) * size, a)
        if GATED:
            tl.store(shares + tl.program_id(1) * size + COLUMNS * ROWS, b)
        tl.debug_barrier()  # one thread takes the ticket, for the stores of all
        last = tl.atomic_add(tickets + cell, 1, sem="acq_rel") == SPLIT - 1
        tl.store(tickets + cell, 0, mask=last)
        if last:
            a, b = total_of(shares, SPLIT, size, COLUMNS * ROWS, GATED)
    if CHANNELS:
        channel = first + tl.arange(0, COLUMNS)
        scales += expert * N + channel
        a *= tl.load(scales, mask=channel < OUTPUTS, other=0.0)[:, None]
        if GATED:
            b *= tl.load(scales + OUTPUTS, mask=channel < OUTPUTS, other=0.0)[:, None]
    if squares is not None:
        factor = norm_factor(squares, source, eps, PARTS, K)[None, :]
        a *= factor
        b *= factor
    column, target = first + tl.arange(0, COLUMNS), target.to(tl.int64)
    if bias is not None:
        at = (expert * N + column)[:, None]
        a, b = with_bias(a, b, bias, at, (column < OUTPUTS)[:, None], OUTPUTS, GATED)
    if GATED:
        a = passed(a, b, GELU, CLAMPED)
    there = column[None, :] < OUTPUTS
    stored, spot = inside[:, None] & there & last, target[:, None] * OUTPUTS + column[None, :]
    made = tl.trans(a).to(MADE)
    if out_scales is not None:
        made, scale = quantised(tl.where(there, made, 0.0), POWERS)
        tl.store(out_scales + target * ((OUTPUTS + 127) // 128) + tile, scale, mask=inside & last)
    tl.store(out + spot, made, mask=stored)


@triton.jit
def _choices_of(order, blocks, block, choices, most, ROWS: tl.constexpr):
    """The expert of a block, and the first of its choices and the one behind its last."""
    if blocks is None:
        expert, begin = 0, block * ROWS
        end = tl.minimum(begin + ROWS, choices)
    elif order is None:
        expert = tl.load(blocks + block)
        begin, end = block, tl.where(expert >= 0, block + 1, block)
        expert = tl.maximum(expert, 0)
    else:
        expert = tl.load(blocks + block)
        begin, end = tl.load(blocks + most + block), tl.load(blocks + 2 * most + block)
    return expert, begin, end


@triton.jit
def rows_at(order, begin, end, ROWS: tl.constexpr, PER_ROW: tl.constexpr, SCATTER: tl.constexpr):
    """Which of the ROWS rows from `begin` on are there, where each is read, int64, and where it goes."""
    place = begin + tl.arange(0, ROWS)
    inside = place < end
    choice = place
    if order is not None:
        choice = tl.load(order + place, mask=inside, other=0)
    source = choice // PER_ROW if PER_ROW > 0 else place
    target = choice if SCATTER else place
    return inside, tl.where(inside, source, 0).to(tl.int64), target


@triton.jit
def _folded(
    x, x_scales, weights, scales, source, expert, first,
    N: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SPLIT: tl.constexpr, FOLDS: tl.constexpr, GATED: tl.constexpr,
    BLOCKS: tl.constexpr, CHANNELS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """This program's part of weight . rows^T: FOLDS stretches of k, each on its own, then their sum."""
    stretch = tl.program_id(1) * FOLDS
    a, b = _stretch(
        x, x_scales, weights, scales, source, expert, first, stretch,
        N, K, OUTPUTS, ROWS, COLUMNS, DEPTH, SPLIT * FOLDS, GATED, BLOCKS, CHANNELS, TOGETHER,
    )  # fmt: skip
    for other in tl.static_range(1, FOLDS):
        more_a, more_b = _stretch(
            x, x_scales, weights, scales, source, expert, first, stretch + other,
            N, K, OUTPUTS, ROWS, COLUMNS, DEPTH, SPLIT * FOLDS, GATED, BLOCKS, CHANNELS, TOGETHER,
        )  # fmt: skip
        a += more_a
        b += more_b
    return a, b


@triton.jit
def _stretch(
    x, x_scales, weights, scales, source, expert, first, stretch,
    N: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, STRETCHES: tl.constexpr, GATED: tl.constexpr, BLOCKS: tl.constexpr,
    CHANNELS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """A stretch of k of weight . rows^T, float32 [COLUMNS, ROWS]; gated, of both halves' columns."""
    part: tl.constexpr = K // STRETCHES if STRETCHES > 1 else K
    start = stretch * part
    width: tl.constexpr = (K + 127) // 128
    if BLOCKS:
        scales += (expert * ((N + 127) // 128) + first // 128) * width
    whole = None
    if CHANNELS:
        whole = tl.load(x_scales + source)
    row = expert * N + first
    a = tl.zeros((COLUMNS, ROWS), tl.float32)
    b = tl.zeros((COLUMNS, ROWS), tl.float32)
    if part <= _MOST_STEPS * DEPTH:
        # Without a loop of its own the loop over tiles is the innermost: the next one's loads are under way.
        for step in tl.static_range((part + DEPTH - 1) // DEPTH):
            a, b = _step(
                a, b, x, x_scales, weights, scales, source, row, start + step * DEPTH, whole,
                K, OUTPUTS, DEPTH, GATED, BLOCKS, CHANNELS,
            )  # fmt: skip
    else:
        for at in range(start, start + part, TOGETHER * DEPTH):
            for step in tl.static_range(TOGETHER):
                a, b = _step(
                    a, b, x, x_scales, weights, scales, source, row, at + step * DEPTH, whole,
                    K, OUTPUTS, DEPTH, GATED, BLOCKS, CHANNELS,
                )  # fmt: skip
    return a, b


@triton.jit
def _step(
    a, b, x, x_scales, weights, scales, source, row, at, whole,
    K: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, GATED: tl.constexpr, BLOCKS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """The sums with DEPTH more of k. `whole`: scales of whole rows."""
    width: tl.constexpr = (K + 127) // 128
    column = at + tl.arange(0, DEPTH)
    if K % DEPTH == 0:
        values = tl.load(x + source[:, None] * K + column[None, :])
    else:
        values = tl.load(x + source[:, None] * K + column[None, :], mask=column[None, :] < K, other=0.0)
    if BLOCKS:
        each = tl.load(x_scales + source * width + at // 128)
        scale = tl.load(scales + at // 128)
        a += tl.dot(weights.load([row, at]), values.T) * (each * scale)[None, :]
        if GATED:
            scale = tl.load(scales + OUTPUTS // 128 * width + at // 128)
            b += tl.dot(weights.load([row + OUTPUTS, at]), values.T) * (each * scale)[None, :]
    elif CHANNELS:
        # Scaled here and not at the end: a bare sum would stay in the accumulators.
        a += tl.dot(weights.load([row, at]), values.T) * whole[None, :]
        if GATED:
            b += tl.dot(weights.load([row + OUTPUTS, at]), values.T) * whole[None, :]
    else:
        a = tl.dot(weights.load([row, at]), values.T, a, input_precision="ieee")
        if GATED:
            b = tl.dot(weights.load([row + OUTPUTS, at]), values.T, b, input_precision="ieee")
    return a, b


@triton.jit
def total_of(shares, SPLIT: tl.constexpr, SIZE: tl.constexpr, SECOND: tl.constexpr, GATED: tl.constexpr):
    """The sums of all parts, in order; loads past L1, which does not see the stores of other SMs."""
    a = tl.zeros(shares.shape, tl.float32)
    b = tl.zeros(shares.shape, tl.float32)
    for other in tl.static_range(SPLIT):
        a += tl.load(shares + other * SIZE, cache_modifier=".cg")
        if GATED:
            b += tl.load(shares + other * SIZE + SECOND, cache_modifier=".cg")
    return a, b


@triton.jit
def where(cell, count, TILES: tl.constexpr, GROUP: tl.constexpr):
    """A cell's block of rows and its tile of columns: GROUP blocks share columns before the next."""
    first = cell // (GROUP * TILES) * GROUP
    here = tl.minimum(count - first, GROUP)
    within = cell % (GROUP * TILES)
    return first + within % here, within // here
