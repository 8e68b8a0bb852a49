"""Absorbed latent attention by the exact arithmetic: a query's bits depend on its own path alone.

A program takes some heads of one query, which are enough rows for the matrix unit, and so nothing of what is
beside it: plain rows, chains, nodes of trees and rows of prompts are one thing. Blocks and parts are those of
`exact_parts`; of rows that decode, few at a time, several programs share a context by whole parts, as in
`exact_attend`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eyas.engine.kernels.attention.attend import QueryRows
from eyas.engine.kernels.attention.exact_attend import ExactLaunch, from_left, share_of, write
from eyas.engine.kernels.attention.exact_blocks import depth_of, rows_at
from eyas.engine.kernels.attention.exact_parts import (
    BLOCK,
    UNSEEN,
    PartSizes,
    add_block,
    leave,
    merged,
    none_of_part,
    nothing,
    part_begin,
    part_from,
)
from eyas.engine.kernels.attention.paged import PagedKv, pages_of
from eyas.engine.kernels.latent.latent_tiles import latent_tile_rows
from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import cdiv, padded_batch, power_of_2

MOST_SHARED = 16
"""Queries of a launch in which several programs share a context: each needs memory for all its parts."""

_PROGRAMS, _MOST_SHARES = 264, 16
_MOST_HEADS = 32  # of a program: two results of 512 columns for each have to stay in registers


@dataclass(frozen=True)
class _LatentLayout:
    """The kernels' compile-time parameters; `dim`: of a latent."""

    width: int
    words: int
    heads: int
    dim: int
    rotated: int
    page_size: int
    page_stride: int
    tile: int
    shares: int
    pdl: bool
    parts: PartSizes

    @property
    def paths(self) -> bool:
        return self.words > 0

    @property
    def tiles(self) -> int:
        return -(-self.heads // self.tile)

    @property
    def row(self) -> int:
        """Elements of a query's head, and of a cached row."""
        return self.dim + self.rotated


def attend_latents_exactly(
    q: torch.Tensor, kv: PagedKv, queries: QueryRows, launch: ExactLaunch, out: torch.Tensor
) -> None:
    """softmax(scale q k) v of q [B * width, heads, latent + rotated], contiguous -> out [.., heads, latent].

    `kv`: over rows of latent + rotated elements, with one head and one field; its rule may have a scale
    alone. Raises ValueError for what only draft heads ask for.
    """
    if queries.extent or kv.firsts is not None:
        raise ValueError("the exact arithmetic has no levels of growing trees, and no first rows of slots")
    words = 0 if queries.mask is None else queries.mask.shape[0]
    layout = replace(_layout(q, kv, out, launch.parts), width=queries.width, words=words, pdl=launch.pdl)
    if q.shape[0] <= MOST_SHARED:
        programs = padded_batch(queries.slots.shape[0]) * queries.width * layout.tiles
        layout = replace(layout, shares=min(_MOST_SHARES, cdiv(_PROGRAMS, programs)))
    masks = queries.starts if queries.mask is None else queries.mask
    where = (kv.tables, kv.tables.stride(0), queries.slots, queries.starts, masks)
    left = (launch.accs, launch.peaks, launch.totals, launch.tickets)
    grid = (layout.tiles * layout.shares, queries.width, queries.slots.shape[0])
    _attend[grid](
        *(q, kv.pool, *where, out, *left, kv.rule.factor, layout), **_options(layout), launch_pdl=launch.pdl
    )


def attend_latent_chunks_exactly(
    q: torch.Tensor, kv: PagedKv, tiles: torch.Tensor, out: torch.Tensor, parts: PartSizes | None = None
) -> None:
    """Exact attention of chunks' rows, of which tiles int32 [T, 4] are as `latent_attend` takes them."""
    layout = _layout(q, kv, out, parts or PartSizes())
    grid = (layout.tiles, latent_tile_rows(q.shape[1]), tiles.shape[0])
    where = (kv.tables, kv.tables.stride(0), tiles)
    _attend_chunks[grid](*(q, kv.pool, *where, out, kv.rule.factor, layout), **_options(layout))


def _layout(q: torch.Tensor, kv: PagedKv, out: torch.Tensor, parts: PartSizes) -> _LatentLayout:
    """The layout of single rows, which nothing shares."""
    heads, latent = out.shape[1:]
    return _LatentLayout(
        width=1,
        words=0,
        heads=heads,
        dim=latent,
        rotated=q.shape[2] - latent,
        page_size=kv.page_size,
        page_stride=kv.pool.stride(0),
        tile=min(_MOST_HEADS, max(16, power_of_2(heads))),
        shares=1,
        pdl=False,
        parts=parts,
    )


def _options(layout: _LatentLayout) -> dict[str, object]:
    return {"num_warps": 4 if layout.tile == 16 else 8, "num_stages": 2, "enable_fp_fusion": False}


@kernel(do_not_specialize=["tables", "table_stride", "slots", "starts", "masks", "tickets"])
def _attend(
    q, pool, tables, table_stride, slots, starts, masks, out, accs, peaks, totals, tickets, scale,
    layout: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of heads * shares, width, B)."""
    share, sequence = tl.program_id(0) % layout.shares, tl.program_id(2)
    if layout.pdl:
        gdc_launch_dependents()
        gdc_wait()
    start = tl.load(starts + sequence)
    table = tables + tl.load(slots + sequence).to(tl.int64) * table_stride
    query = sequence * layout.width + tl.program_id(1)
    sees = masks + query
    head = tl.program_id(0) // layout.shares * layout.tile + tl.arange(0, layout.tile)
    own = start + tl.program_id(1)
    if layout.paths:
        own = start + tl.max(depth_of(sees + tl.zeros_like(head), layout))
    end = own + 1
    _, used, length = share_of(0, end, layout)
    if share >= used:
        return
    real = head < layout.heads
    place = query * layout.heads + head
    q_latent, q_rotated = _queries(q, place, real, layout)
    mine = part_from(share * length, layout)
    stop = tl.minimum(part_from((share + 1) * length, layout), part_from(end, layout))
    all_heads = tl.num_programs(2) * layout.width * layout.heads
    acc, peak, total = nothing(layout.tile, layout.dim)
    for part in range(mine, stop):
        part_acc, part_peak, part_total = _over_part(
            q_latent, q_rotated, sees, pool, table, start, part, end, start + layout.width, scale, layout
        )
        if share == 0:
            acc, peak, total = merged(acc, peak, total, part_acc, part_peak, part_total)
        else:
            leave(
                accs, peaks, totals, part * all_heads + place, part_acc, part_peak, part_total, real, layout
            )
    if used == 1:
        write(out, place, acc / total[:, None], real, layout)
    else:
        if share == 0:
            leave(accs, peaks, totals, place, acc, peak, total, real, layout)
        tl.debug_barrier()  # all threads' parts are written before the ticket is drawn
        ticket = tickets + query * layout.tiles + tl.program_id(0) // layout.shares
        if tl.atomic_add(ticket, 1, sem="acq_rel") == used - 1:
            acc, peak, total = from_left(accs, peaks, totals, place, real, 0, end, layout)
            write(out, place, acc / total[:, None], real, layout)
            tl.store(ticket, 0)


@kernel(do_not_specialize=["tables", "table_stride", "tiles"])
def _attend_chunks(q, pool, tables, table_stride, tiles, out, scale, layout: tl.constexpr):
    """Grid (tiles of heads, the most rows of a tile, T)."""
    tile, row = tiles + 4 * tl.program_id(2), tl.program_id(1)
    if row >= tl.load(tile + 3):
        return
    table = tables + tl.load(tile).to(tl.int64) * table_stride
    end = tl.load(tile + 2) + row + 1
    head = tl.program_id(0) * layout.tile + tl.arange(0, layout.tile)
    real = head < layout.heads
    place = (tl.load(tile + 1) + row).to(tl.int64) * layout.heads + head
    q_latent, q_rotated = _queries(q, place, real, layout)
    acc, peak, total = nothing(layout.tile, layout.dim)
    for part in range(part_from(end, layout)):
        part_acc, part_peak, part_total = _over_part(
            q_latent, q_rotated, None, pool, table, end, part, end, end, scale, layout
        )
        acc, peak, total = merged(acc, peak, total, part_acc, part_peak, part_total)
    write(out, place, acc / total[:, None], real, layout)


@triton.jit
def _queries(q, place, real, layout: tl.constexpr):
    """The heads at `place` [tile] of q: the part for latents, and the part for rotated keys."""
    at = q + place.to(tl.int64)[:, None] * layout.row
    latent = tl.load(at + tl.arange(0, layout.dim)[None, :], mask=real[:, None], other=0.0)
    rotated = layout.dim + tl.arange(0, layout.rotated)[None, :]
    return latent, tl.load(at + rotated, mask=real[:, None], other=0.0)


@triton.jit
def _over_part(
    q_latent, q_rotated, sees, pool, table, start, part, end, there, scale, layout: tl.constexpr
):  # fmt: skip
    """The softmax over the columns of one part below `end`, all of which the query sees.

    Columns from `start` on are found along its path, if it has one; rows below `there` are in the pool.
    """
    acc, peak, total = none_of_part(layout.tile, layout.dim)
    latent, rotated = tl.arange(0, layout.dim)[None, :], tl.arange(0, layout.rotated)[None, :]
    first = part_begin(part, layout)
    last = tl.minimum(part_begin(part + 1, layout), end)
    for block in range(first, last, BLOCK):
        column = block + tl.arange(0, BLOCK)
        row = rows_at(column, sees, start, layout)
        pages = pages_of(table, row, there, layout.page_size)
        inside = column < last
        at = pool + pages * layout.page_stride + (row % layout.page_size)[:, None] * layout.row
        k = tl.load(at + latent, mask=inside[:, None], other=0.0)
        k_rotated = tl.load(at + layout.dim + rotated, mask=inside[:, None], other=0.0)
        scores = tl.dot(q_latent, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_rotated, tl.trans(k_rotated), scores, input_precision="ieee") * scale
        acc, peak, total = add_block(acc, peak, total, tl.where(inside[None, :], scores, UNSEEN), k)
    return acc, peak, tl.max(total, 1)
