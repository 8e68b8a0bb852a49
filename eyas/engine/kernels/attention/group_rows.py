"""The rows of a forward in a further group of layers: where that group's page table has them written.

Rows, sequences and tiles are those of the first group; pages alone differ.
"""

from __future__ import annotations

from dataclasses import replace

import triton.language as tl
from torch import Tensor

from eyas.engine.batch.rows import DecodeRows, ForwardRows
from eyas.engine.kernels.drafts.rounds import physical_rows
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv

LANES = 128  # rows per program


def in_group(rows: ForwardRows, table: Tensor, page_size: int, pdl: bool) -> ForwardRows:
    """`rows` as a group of layers has them whose pages `table` int32 [slots, most pages] names."""
    kv_rows, first = rows.kv_rows.clone(), 0  # those of padding stay -1
    for group in rows.groups:
        own = slice(first, first + group.rows)
        _rounds(group, rows.kv_rows[own], table, kv_rows[own], page_size, pdl)
        first += group.rows
    if rows.tiles is not None:
        _chunks(rows.tiles, table, kv_rows[first:], page_size, pdl)
    return replace(rows, kv_rows=kv_rows, table=table)


def _rounds(group: DecodeRows, there: Tensor, table: Tensor, out: Tensor, page_size: int, pdl: bool) -> None:
    """`there`: the rows of the first group, of which empty ones are -1."""
    _place_rounds[(cdiv(group.rows, LANES),)](
        group.slots,
        group.starts,
        there,
        table,
        out,
        group.rows,
        table.shape[1],
        WIDTH=group.width,
        PAGE_SIZE=page_size,
        BLOCK=LANES,
        PDL=pdl,
        num_warps=LANES // 32,
        launch_pdl=pdl,
    )


@kernel(do_not_specialize=("there", "table", "out", "rows", "max_pages"))
def _place_rounds(
    slots,
    starts,
    there,
    table,
    out,
    rows,
    max_pages,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    real = inside & (tl.load(there + row, mask=inside, other=-1) >= 0)
    slot = tl.load(slots + row // WIDTH, mask=inside, other=0)
    start = tl.load(starts + row // WIDTH, mask=inside, other=0)
    placed = physical_rows(table, slot, start + row % WIDTH, real, max_pages, PAGE_SIZE)
    tl.store(out + row, placed, mask=inside)


def _chunks(tiles: Tensor, table: Tensor, out: Tensor, page_size: int, pdl: bool) -> None:
    """`tiles` int32 [T, 4]: as of `ForwardRows`; those without rows are padding."""
    _place_chunks[(tiles.shape[0],)](
        tiles,
        table,
        out,
        table.shape[1],
        PAGE_SIZE=page_size,
        BLOCK=LANES,
        PDL=pdl,
        num_warps=LANES // 32,
        launch_pdl=pdl,
    )


@kernel(do_not_specialize=("tiles", "table", "out", "max_pages"))
def _place_chunks(
    tiles, table, out, max_pages, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    after_previous(PDL)
    tile = tiles + 4 * tl.program_id(0)
    slot, first, start, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    for done in range(0, count, BLOCK):
        lane = done + tl.arange(0, BLOCK)
        inside = lane < count
        placed = physical_rows(table, slot, start + lane, inside, max_pages, PAGE_SIZE)
        tl.store(out + first + lane, placed, mask=inside)
