"""Hidden states of MTP layers: that of the row before each accepted row, and that of each page's newest row.

`MtpStates` of `eyas.engine.models.ops.machine` says why; `TorchMtpStates` is the form for a CPU. Rows
are identified by the physical row that each one writes.
"""

from __future__ import annotations

import torch
import triton.language as tl

from eyas.engine.batch.rows import ForwardRows
from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import cdiv

BLOCK = 1024


def sources(rows: ForwardRows, tables: torch.Tensor, page_size: int) -> torch.Tensor:
    """Where the row before each one is, int32 [m]: the number of a row here; -2 less its page; -1: none.

    `tables` int32 [slots, pages]. Rows of a round, and of a tile, follow each other; the first of a tile
    follows the tile before it if its own row does.
    """
    count, device = rows.count, rows.positions.device
    index = torch.arange(-1, count, dtype=torch.int32, device=device)  # and a place for what means nothing
    first = 0
    for group in rows.groups:
        own = index[first : first + group.rows].view(-1, group.width)
        starts = group.starts[: own.shape[0]]
        own[:, 0] = torch.where(starts > 0, -2 - _pages(tables, group.slots, starts, page_size), -1)
        first += group.rows
    if rows.tiles is None:
        return index[:count]
    slots, place, starts, many = rows.tiles.unbind(1)
    pages = _pages(tables, slots, starts, page_size)
    before = pages * page_size + (starts - 1) % page_size
    place = place.long() + first
    here = (place > 0) & (rows.kv_rows[(place - 1).clamp(min=0)] == before)
    source = torch.where(starts > 0, torch.where(here, place.int() - 1, -2 - pages), -1)
    index[torch.where(many > 0, place, count)] = source
    return index[:count]


def _pages(tables: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, page_size: int) -> torch.Tensor:
    """Pages of the rows before `starts`, int32; any number for row 0 and padding, which may be anywhere."""
    return tables[slots.long(), ((starts - 1).long() // page_size).clamp(0, tables.shape[1] - 1)]


def before(
    gave: torch.Tensor, source: torch.Tensor, states: torch.Tensor, stage: int, pdl: bool = False
) -> torch.Tensor:
    """The output of the row before each one at a stage, [m, width]; zeros: there is none.

    gave [m, width]: what the rows gave there. source int32 [m], as of `sources`; kept [pages, stages, width].
    """
    rows, width = gave.shape
    out = torch.empty_like(gave)
    _before[(rows, cdiv(width, BLOCK))](
        *(gave, source, states, out, stage, states.stride(0)),
        WIDTH=width,
        BLOCK=BLOCK,
        PDL=pdl,
        launch_pdl=pdl,
    )
    return out


def keep(
    gave: torch.Tensor, kv_rows: torch.Tensor, states: torch.Tensor, page_size: int, pdl: bool = False
) -> None:
    """The last row in each page leaves there what it gave: gave [m, stages, width], kv_rows int32 [m]."""
    rows, stages, width = gave.shape
    _keep[(rows, cdiv(stages * width, BLOCK))](
        *(gave, kv_rows, states, rows, states.stride(0)),
        PAGE_SIZE=page_size,
        WIDTH=stages * width,
        BLOCK=BLOCK,
        PDL=pdl,
        launch_pdl=pdl,
    )


@kernel(do_not_specialize=["stage", "page_stride"])
def _before(
    gave, source, states, out, stage, page_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = tl.load(source + row).to(tl.int64)
    here = tl.load(gave + place * WIDTH + column, mask=inside & (place >= 0), other=0.0)
    page = states + (-2 - place) * page_stride + stage * WIDTH
    there = tl.load(page + column, mask=inside & (place < -1), other=0.0)
    tl.store(out + row * WIDTH + column, tl.where(place >= 0, here, there), mask=inside)


@kernel(do_not_specialize=["rows", "page_stride"])
def _keep(
    gave, kv_rows, states, rows, page_stride,
    PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(kv_rows + row)
    following = tl.load(kv_rows + row + 1, mask=row + 1 < rows, other=-1)
    last = (own >= 0) & ((own % PAGE_SIZE == PAGE_SIZE - 1) | (following != own + 1))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    taken = tl.load(gave + row * WIDTH + column, mask=last & (column < WIDTH))
    page = states + (own // PAGE_SIZE).to(tl.int64) * page_stride
    tl.store(page + column, taken, mask=last & (column < WIDTH))
