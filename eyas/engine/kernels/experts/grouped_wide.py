"""Products of many rows for each expert: rows on the matrix unit's long side.

Where an expert has as many rows as the matrix unit takes at once, a tile lies as its result does: nothing is
turned round on the way out, and more of what is in shared memory is used twice. What bounds them is L2: tall
blocks read a weight less often. An expert's last block may be less than half full: then a tile has half of
its rows, where those are enough for the matrix unit. Rows of 16 bits that lie by place, as those of `down`
do, come by the tensor memory accelerator as weights do; then programs walk over tiles, as many as a GPU runs
at a time. Of FP8 that was not timed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eyas.engine.kernels.experts.grouped_kernels import where
from eyas.engine.kernels.experts.grouped_task import GroupedTask
from eyas.engine.kernels.experts.grouped_tiles import programs
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.products.activation import passed, with_bias
from eyas.engine.kernels.products.blocks import quantised
from eyas.engine.kernels.products.skinny import ProductLaunch

FEWEST = 64
"""Numbers along the matrix unit's long side."""


def takes(task: GroupedTask) -> bool:
    """True if its blocks are tall enough, and no programs share its k."""
    return task.walk.grouped is not None and task.tile.rows >= FEWEST and task.tile.split == 1


def half_of(rows: int, itemsize: int) -> int:
    """The rows of a tile whose block of `rows` is less than half full; 0: there is no such tile. FP8 would
    take more registers than there are.
    """
    return rows // 2 if itemsize > 1 and rows >= 2 * FEWEST else 0


def start(task: GroupedTask, launch: ProductLaunch) -> None:
    """Computes `task.out`."""
    placed, cells = task.walk.per_row == 0 and task.shape.itemsize > 1, task.most * task.tiles
    numbers, scales = task.rows
    half = half_of(task.tile.rows, task.shape.itemsize)
    given = [task.placed(rows) if placed else numbers for rows in (task.tile.rows, half or task.tile.rows)]
    _by_depth[(min(cells, programs(task.tile, task.shape)) if placed else cells,)](
        *(*given, scales, task.described, task.scales, task.bias),
        *(*task.made, *task.order, task.most),
        **task.constants(),
        **task.gated(),
        HALF=half,
        PLACED=placed,
        STAGES=task.tile.stages,
        PDL=launch.pdl,
        num_warps=task.tile.warps,
        launch_pdl=launch.pdl,
    )


@kernel(do_not_specialize=["most"])
def _by_depth(
    x, half, x_scales, weights, scales, bias, out, out_scales, order, blocks, most,
    N: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr, PER_ROW: tl.constexpr, SCATTER: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, CLAMPED: tl.constexpr, BLOCKS: tl.constexpr,
    CHANNELS: tl.constexpr, POWERS: tl.constexpr, MADE: tl.constexpr, HALF: tl.constexpr,
    PLACED: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile per program, or PLACED one after the other; x and `half`, x by HALF rows, are descriptors
    then.
    """
    after_previous(PDL)
    count = tl.load(blocks + 3 * most)
    cells = count * ((OUTPUTS + COLUMNS - 1) // COLUMNS)
    if PLACED:
        for cell in range(tl.program_id(0), cells, tl.num_programs(0)):
            _whole_or_half(
                x, half, x_scales, weights, scales, bias, out, out_scales, order, blocks, most, cell, count,
                N, K, OUTPUTS, ROWS, COLUMNS, DEPTH, GROUP, PER_ROW, SCATTER, GATED, GELU, CLAMPED, BLOCKS,
                CHANNELS, POWERS, MADE, HALF, PLACED, STAGES,
            )  # fmt: skip
    elif tl.program_id(0) < cells:
        _whole_or_half(
            x, half, x_scales, weights, scales, bias, out, out_scales, order, blocks, most,
            tl.program_id(0), count,
            N, K, OUTPUTS, ROWS, COLUMNS, DEPTH, GROUP, PER_ROW, SCATTER, GATED, GELU, CLAMPED, BLOCKS,
            CHANNELS, POWERS, MADE, HALF, PLACED, STAGES,
        )  # fmt: skip


@triton.jit
def _whole_or_half(
    x, half, x_scales, weights, scales, bias, out, out_scales, order, blocks, most, cell, count,
    N: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr, PER_ROW: tl.constexpr, SCATTER: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, CLAMPED: tl.constexpr, BLOCKS: tl.constexpr,
    CHANNELS: tl.constexpr, POWERS: tl.constexpr, MADE: tl.constexpr, HALF: tl.constexpr,
    PLACED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of as many rows as its block has."""
    block, tile = where(cell, count, (OUTPUTS + COLUMNS - 1) // COLUMNS, GROUP)
    rows = ROWS
    if HALF > 0:  # known to the compiler, which else would make a tile of no rows
        rows = tl.load(blocks + 2 * most + block) - tl.load(blocks + most + block)
        if rows <= HALF:
            _one_tile(
                half, x_scales, weights, scales, bias, out, out_scales, order, blocks, most, block, tile,
                N, K, OUTPUTS, HALF, COLUMNS, DEPTH, PER_ROW, SCATTER, GATED, GELU, CLAMPED, BLOCKS, CHANNELS,
                POWERS, MADE, PLACED, STAGES,
            )  # fmt: skip
    if HALF == 0 or rows > HALF:
        _one_tile(
            x, x_scales, weights, scales, bias, out, out_scales, order, blocks, most, block, tile,
            N, K, OUTPUTS, ROWS, COLUMNS, DEPTH, PER_ROW, SCATTER, GATED, GELU, CLAMPED, BLOCKS, CHANNELS,
            POWERS, MADE, PLACED, STAGES,
        )  # fmt: skip


@triton.jit
def _one_tile(
    x, x_scales, weights, scales, bias, out, out_scales, order, blocks, most, block, tile,
    N: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, PER_ROW: tl.constexpr, SCATTER: tl.constexpr, GATED: tl.constexpr,
    GELU: tl.constexpr, CLAMPED: tl.constexpr, BLOCKS: tl.constexpr, CHANNELS: tl.constexpr,
    POWERS: tl.constexpr, MADE: tl.constexpr, PLACED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the result of one block of rows."""
    TILES: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    WIDTH: tl.constexpr = (K + 127) // 128
    expert, begin, inside, source, target = rows_of(order, blocks, most, block, ROWS, PER_ROW, SCATTER)
    first = tile * COLUMNS
    row = expert * N + first
    whole = 1.0
    if BLOCKS:
        scales += (expert * ((N + 127) // 128) + first // 128) * WIDTH
    if CHANNELS:
        whole = tl.load(x_scales + source)
    a = tl.zeros((ROWS, COLUMNS), tl.float32)
    b = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in tl.range(0, K, DEPTH, num_stages=STAGES):
        values = x.load([begin, at]) if PLACED else values_of(x, source, at, K, DEPTH)
        by_row, scale, up_scale = whole, 1.0, 1.0
        if BLOCKS:
            by_row = tl.load(x_scales + source * WIDTH + at // 128)
            scale = tl.load(scales + at // 128)
            if GATED:
                up_scale = tl.load(scales + OUTPUTS // 128 * WIDTH + at // 128)
        a = plus(a, values, weights.load([row, at]), by_row, scale, BLOCKS or CHANNELS)
        if GATED:
            b = plus(b, values, weights.load([row + OUTPUTS, at]), by_row, up_scale, BLOCKS or CHANNELS)
    column = first + tl.arange(0, COLUMNS)
    there = column < OUTPUTS
    if CHANNELS:
        channel = scales + expert * N + column
        a *= tl.load(channel, mask=there, other=0.0)[None, :]
        if GATED:
            b *= tl.load(channel + OUTPUTS, mask=there, other=0.0)[None, :]
    if bias is not None:
        at = (expert * N + column)[None, :]
        a, b = with_bias(a, b, bias, at, there[None, :], OUTPUTS, GATED)
    if GATED:
        a = passed(a, b, GELU, CLAMPED)
    made = a.to(MADE)
    if out_scales is not None:
        made, scale = quantised(tl.where(there[None, :], made, 0.0), POWERS)
        tl.store(out_scales + target * TILES + tile, scale, mask=inside)
    tl.store(out + target[:, None] * OUTPUTS + column[None, :], made, mask=inside[:, None] & there[None, :])


@triton.jit
def rows_of(
    order, blocks, most, block, ROWS: tl.constexpr, PER_ROW: tl.constexpr, SCATTER: tl.constexpr
):  # fmt: skip
    """A block's expert and first place; and of its ROWS rows: which are there, where each is read and where
    it goes.
    """
    # Past L1: others may have written them just now.
    expert = tl.load(blocks + block, cache_modifier=".cg")
    begin = tl.load(blocks + most + block, cache_modifier=".cg")
    end = tl.load(blocks + 2 * most + block, cache_modifier=".cg")
    place = begin + tl.arange(0, ROWS)
    inside = place < end
    choice = tl.load(order + place, mask=inside, other=0, cache_modifier=".cg")
    source = choice // PER_ROW if PER_ROW > 0 else place
    target = choice if SCATTER else place
    return expert, begin, inside, tl.where(inside, source, 0).to(tl.int64), target.to(tl.int64)


@triton.jit
def values_of(x, source, at, K: tl.constexpr, DEPTH: tl.constexpr):
    """DEPTH elements of the rows, from `at` on."""
    column = at + tl.arange(0, DEPTH)
    if K % DEPTH == 0:
        return tl.load(x + source[:, None] * K + column[None, :])
    else:
        return tl.load(x + source[:, None] * K + column[None, :], mask=column[None, :] < K, other=0.0)


@triton.jit
def plus(total, values, weight, by_row, scale, SCALED: tl.constexpr):
    """The total with rows . weight^T, which is scaled by row, and as a whole, where it is in FP8."""
    if SCALED:
        return total + tl.dot(values, weight.T) * (by_row * scale)[:, None]
    else:
        return tl.dot(values, weight.T, total, input_precision="ieee")
