"""Products of experts whose k is short: a program keeps a block's rows, and sweeps over its expert's weight.

A tile of such a product is over in two steps, so most of its time would go into finding out which expert and
rows it has. Here rows are read once, and what the loop reads comes by the tensor memory accelerator, from
addresses that are known: tiles ahead. Few rows lie on the matrix unit's short side, and the result is
transposed before it is stored; tall blocks need no transposing. Before few rows are there, the first tiles of
their weights are under way: what is left of memory's time while the kernel before ends is used.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eyas.engine.kernels.experts.grouped_kernels import where
from eyas.engine.kernels.experts.grouped_task import GroupedTask
from eyas.engine.kernels.experts.grouped_tiles import SHORT
from eyas.engine.kernels.experts.grouped_wide import FEWEST, plus, rows_of, values_of
from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.kernels.products.skinny import ProductLaunch

_SWEPT = 14  # tiles of columns over which a program sweeps, about


def takes(task: GroupedTask) -> bool:
    """True if it is experts' `down`, k has at most two steps and is not split, and a tile has 64 columns or
    more.
    """
    short = cdiv(task.shape.k, task.tile.depth) <= SHORT and task.tile.columns >= FEWEST
    return task.walk.grouped is not None and task.gate is None and short and task.tile.split == 1


def start(task: GroupedTask, launch: ProductLaunch) -> None:
    """Computes `task.out`."""
    spans = cdiv(task.tiles, _SWEPT)
    _sweep[(task.most * spans,)](
        *(*task.rows, task.described, task.scales, task.bias, task.made[0], *task.order, task.most),
        **task.constants(),
        TURNED=task.tile.rows < FEWEST,
        EACH=cdiv(task.tiles, spans),
        SPANS=spans,
        STAGES=task.tile.stages,
        PDL=launch.pdl,
        EARLY=task.tile.rows < FEWEST,  # taller ones come from `grouped_wide`, which lets it at once
        num_warps=task.tile.warps,
        launch_pdl=launch.pdl,
    )


@kernel(do_not_specialize=["most"])
def _sweep(
    x, x_scales, weights, scales, bias, out, order, blocks, most,
    N: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr, PER_ROW: tl.constexpr, SCATTER: tl.constexpr,
    BLOCKS: tl.constexpr, CHANNELS: tl.constexpr, MADE: tl.constexpr, TURNED: tl.constexpr,
    EACH: tl.constexpr, SPANS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (blocks * SPANS): EACH tiles of columns of one block of rows. EARLY: the order is there at once,
    since what makes the rows waited for it before it let this kernel be launched, as `product_kernel` does.
    """
    TILES: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    WIDTH: tl.constexpr = (K + 127) // 128
    TWO: tl.constexpr = K > DEPTH
    NEXT: tl.constexpr = DEPTH // 128  # block of k
    SCALED: tl.constexpr = BLOCKS or CHANNELS
    if PDL:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    count = tl.load(blocks + 3 * most, cache_modifier=".cg")
    if tl.program_id(0) >= count * SPANS:
        if PDL and EARLY:
            gdc_wait()
        return
    block, span = where(tl.program_id(0), count, SPANS, GROUP)
    expert, _, inside, source, target = rows_of(order, blocks, most, block, ROWS, PER_ROW, SCATTER)
    begin = span * EACH
    if EARLY:  # rows come within the loop: the loads of its first tiles are asked for before it begins
        low = tl.zeros((ROWS, DEPTH), x.dtype.element_ty)
        high, by_low = low, tl.full((ROWS,), 1.0, tl.float32)
        by_high = by_low
    else:
        low, high, by_low, by_high = _rows(x, x_scales, source, K, DEPTH, BLOCKS, CHANNELS)
    for tile in tl.range(begin, tl.minimum(begin + EACH, TILES), num_stages=STAGES):
        if EARLY:
            if tile == begin:
                if PDL:
                    gdc_wait()
                low, high, by_low, by_high = _rows(x, x_scales, source, K, DEPTH, BLOCKS, CHANNELS)
        first = tile * COLUMNS
        row, column = expert * N + first, first + tl.arange(0, COLUMNS)
        scale, high_scale = 1.0, 1.0
        if BLOCKS:
            of_tile = scales + (expert * ((N + 127) // 128) + first // 128) * WIDTH
            scale = tl.load(of_tile)
            if TWO:
                high_scale = tl.load(of_tile + NEXT)
        y = tl.zeros((COLUMNS, ROWS) if TURNED else (ROWS, COLUMNS), tl.float32)
        y = _plus(y, low, weights.load([row, 0]), by_low, scale, SCALED, TURNED)
        if TWO:
            y = _plus(y, high, weights.load([row, DEPTH]), by_high, high_scale, SCALED, TURNED)
        if TURNED:
            y = y.T
        there = column < OUTPUTS
        if CHANNELS:
            y *= tl.load(scales + expert * N + column, mask=there, other=0.0)[None, :]
        if bias is not None:
            y += tl.load(bias + expert * N + column, mask=there, other=0.0).to(tl.float32)[None, :]
        to = out + target[:, None] * OUTPUTS + column[None, :]
        tl.store(to, y.to(MADE), mask=inside[:, None] & there[None, :])


@triton.jit
def _rows(
    x, x_scales, source, K: tl.constexpr, DEPTH: tl.constexpr, BLOCKS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """The rows' numbers in both steps of k, and float32 [rows] that multiplies each; of one step, twice."""
    WIDTH: tl.constexpr = (K + 127) // 128
    low = values_of(x, source, 0, K, DEPTH)
    high = low
    by_low = tl.full(source.shape, 1.0, tl.float32)
    if K > DEPTH:
        high = values_of(x, source, DEPTH, K, DEPTH)
    if BLOCKS or CHANNELS:
        by_low = tl.load(x_scales + source * (WIDTH if BLOCKS else 1))
    by_high = by_low
    if BLOCKS and K > DEPTH:
        by_high = tl.load(x_scales + source * WIDTH + DEPTH // 128)
    return low, high, by_low, by_high


@triton.jit
def _plus(total, values, weight, by_row, scale, SCALED: tl.constexpr, TURNED: tl.constexpr):
    """The total with rows . weight^T, or TURNED weight . rows^T, scaled by row and as a whole if in FP8."""
    if TURNED:
        if SCALED:
            return total + tl.dot(weight, values.T) * (by_row * scale)[None, :]
        else:
            return tl.dot(weight, values.T, total, input_precision="ieee")
    else:
        return plus(total, values, weight, by_row, scale, SCALED)
