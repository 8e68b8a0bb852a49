"""Absorbed latent attention over the paged pool: rows of decode, of chains and trees, and prompt chunks.

All heads read one row per token, whose first `latent` elements are its value too (DeepSeek-V2, arXiv
2405.04434, section 2.1): the rows of a program are queries times heads, and a block of keys is read once for
all of them, and once for scores and results. Rounds are cut into parts of their context, each a result of its
own with the logarithm of its weight; `latent_products.values` adds them up, in their order. Keys before a
sequence's queries are seen by all of them and need no mask; those of the queries themselves have one.

The host knows upper bounds only: lengths are read on the device, and the grid follows from the shapes of the
tensors alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eyas.engine.kernels.attention.attend import QueryRows
from eyas.engine.kernels.attention.attend_tiles import AttentionTiling
from eyas.engine.kernels.attention.paged import PagedKv, pages_of
from eyas.engine.kernels.attention.scores import first_row, lowest_row
from eyas.engine.kernels.attention.softmax import UNSEEN
from eyas.engine.kernels.latent.latent_tiles import (
    latent_chunk_tiling,
    latent_tiling_of,
    least_part,
    piece_of,
)
from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import cdiv


@dataclass(frozen=True)
class LatentScratch:
    """Memory and options that the launches of one stream share; `LatentScratch.on` makes one.

    parts float32 [n, latent], lses float32 [n]: a query head's result over a part, and the base 2 logarithm
    of its sum of exponentials. counts int32 [batch]: parts of each sequence. pdl: programmatic dependent
    launch, for streams in which every kernel so launched waits before it touches what others may.
    """

    parts: torch.Tensor
    lses: torch.Tensor
    counts: torch.Tensor
    pdl: bool

    @classmethod
    def on(
        cls, pool: torch.Tensor, latent: int, heads: int, most: tuple[int, int], pdl: bool
    ) -> LatentScratch:
        """Allocates on the device of `pool`, for up to most[0] sequences of up to most[1] queries, as tiles
        are cut.
        """
        batch, width, device = *most, pool.device
        rows = max(
            b * w * heads * latent_tiling_of(b, w * heads).parts
            for b in range(1, batch + 1)
            for w in range(1, width + 1)
        )
        return cls(
            parts=torch.empty(rows, latent, device=device),
            lses=torch.empty(rows, device=device),
            counts=torch.zeros(batch, dtype=torch.int32, device=device),
            pdl=pdl,
        )


@dataclass(frozen=True)
class PartialResults:
    """Results of B * `width` queries over the parts of their sequences' keys, still to be added up.

    parts float32 [most parts, B * width, heads, latent], lses float32 [most parts, B * width, heads]; of
    sequence b the first counts[b] parts are there, the others may hold anything.
    """

    parts: torch.Tensor
    lses: torch.Tensor
    counts: torch.Tensor
    width: int


@dataclass(frozen=True)
class _LatentAttendLayout:
    """A kernel's compile-time parameters."""

    width: int
    extent: int
    words: int
    heads: int
    latent: int
    rotated: int
    page_size: int
    page_stride: int
    tile: int
    keys: int
    pdl: bool
    bounded: bool
    piece: int
    least: int = 0

    @property
    def rows(self) -> int:
        return self.width * self.heads

    @property
    def row(self) -> int:
        """Elements of a query's head, and of a cached row."""
        return self.latent + self.rotated


def attend_latents(
    q: torch.Tensor,
    kv: PagedKv,
    queries: QueryRows,
    latent: int,
    scratch: LatentScratch,
    tiling: AttentionTiling | None = None,
) -> PartialResults:
    """softmax(scale q k) v of q [B * width, heads, latent + rotated], contiguous, part by part.

    `kv`: over rows of latent + rotated elements, with one head and one field; its rule may have a scale
    alone. What is returned lies in `scratch` until the next call.
    """
    batch, heads = queries.slots.shape[0], q.shape[1]
    tiling = tiling or latent_tiling_of(batch, queries.width * heads)
    extent, words = queries.extent or queries.width, 0 if queries.mask is None else queries.mask.shape[0]
    layout = _layout(kv, heads, latent, tiling, (queries.width, extent, words), scratch.pdl)
    layout = replace(layout, least=least_part(q.shape[0]), piece=piece_of(latent, tiling.rows, batch))
    mask = queries.starts if queries.mask is None else queries.mask
    total = q.shape[0] * heads
    grid = (cdiv(layout.rows, tiling.rows), tiling.parts, batch)
    _attend[grid](
        *(q, kv.pool, kv.tables, kv.tables.stride(0), queries.slots, queries.starts, kv.firsts, mask),
        *(scratch.parts, scratch.lses, scratch.counts, kv.rule.factor, layout),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        launch_pdl=scratch.pdl,
    )
    rows = tiling.parts, q.shape[0], heads
    parts, lses = scratch.parts[: tiling.parts * total], scratch.lses[: tiling.parts * total]
    return PartialResults(parts.view(*rows, latent), lses.view(rows), scratch.counts[:batch], queries.width)


def attend_latent_chunks(
    q: torch.Tensor, kv: PagedKv, tiles: torch.Tensor, latent: int, tiling: AttentionTiling | None = None
) -> torch.Tensor:
    """Attention of chunks' rows q [C, heads, latent + rotated], whole: [C, heads, latent].

    tiles int32 [T, 4]: (slot, first row within q, logical row of that first query, count <=
    latent_tile_rows). A query sees its slot's rows up to its own, which are already in the pool. A tile of
    count 0 does nothing; rows that no tile names are zeros.
    """
    heads = q.shape[1]
    tiling = tiling or latent_chunk_tiling(heads)
    count = max(1, tiling.rows // heads)
    layout = _layout(kv, heads, latent, tiling, (count, count, 0), pdl=False)
    out = q.new_zeros(*q.shape[:2], latent)
    _attend_chunks[(cdiv(layout.rows, tiling.rows), tiles.shape[0])](
        *(q, kv.pool, kv.tables, kv.tables.stride(0), kv.firsts, tiles, out, kv.rule.factor, layout),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out


def _layout(
    kv: PagedKv, heads: int, latent: int, tiling: AttentionTiling, rows: tuple[int, int, int], pdl: bool
) -> _LatentAttendLayout:
    """rows: a sequence's queries, the rows that they may see from the first of them on, words of the mask."""
    width, extent, words = rows
    return _LatentAttendLayout(
        width=width,
        extent=extent,
        words=words,
        heads=heads,
        latent=latent,
        rotated=kv.dim - latent,
        page_size=kv.page_size,
        page_stride=kv.pool.stride(0),
        tile=tiling.rows,
        keys=tiling.keys,
        pdl=pdl,
        bounded=kv.firsts is not None,
        piece=latent,
    )


@kernel(do_not_specialize=["tables", "table_stride", "slots", "starts", "firsts", "masks"])
def _attend(
    q, pool, tables, table_stride, slots, starts, firsts, masks, parts, lses, counts, scale,
    layout: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, parts, B)."""
    tile, part, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if layout.pdl:
        gdc_launch_dependents()
        gdc_wait()
    start = tl.load(starts + sequence)
    slot = tl.load(slots + sequence)
    end = start + layout.extent
    low = lowest_row(firsts, slot, start, 0, 0)
    begin = low // layout.keys * layout.keys
    length = tl.cdiv(tl.cdiv(end - begin, tl.num_programs(1)), layout.keys) * layout.keys
    length = tl.maximum(length, layout.least)
    used = tl.cdiv(end - begin, length)
    if (tile == 0) & (part == 0):
        tl.store(counts + sequence, used)
    if part >= used:
        return
    row = tile * layout.tile + tl.arange(0, layout.tile)
    real = row < layout.rows
    query = sequence * layout.width + row // layout.heads
    place = query.to(tl.int64) * layout.heads + row % layout.heads
    sees = row // layout.heads
    if layout.words == 1:
        sees = tl.load(masks + query, mask=real, other=0)
    elif layout.words > 0:
        sees = masks + tl.where(real, query, 0)  # an address: no register has room for all words
    first = begin + part * length
    last = tl.minimum(first + length, end)
    table = tables + slot.to(tl.int64) * table_stride
    edge = first_row(firsts, slot)
    accs, total, lse = _over_rows(
        q, place, real, sees[:, None], pool, table, start, low, edge, first, last, scale,
        tl.num_programs(2) * layout.width, layout,
    )  # fmt: skip
    place += part.to(tl.int64) * tl.num_programs(2) * layout.rows
    tl.store(lses + place, lse, mask=real)
    column = tl.arange(0, layout.piece)
    for i in tl.static_range(layout.latent // layout.piece):
        to = parts + place[:, None] * layout.latent + i * layout.piece + column[None, :]
        tl.store(to, accs[i] / total[:, None], mask=real[:, None])


@kernel(do_not_specialize=["tables", "table_stride", "firsts", "tiles"])
def _attend_chunks(
    q, pool, tables, table_stride, firsts, tiles, out, scale, layout: tl.constexpr
):  # fmt: skip
    """Grid (tiles of rows, T)."""
    tile = tiles + 4 * tl.program_id(1)
    count = tl.load(tile + 3)
    if count == 0:
        return
    slot = tl.load(tile)
    start = tl.load(tile + 2)
    low = lowest_row(firsts, slot, start, 0, 0)
    row = tl.program_id(0) * layout.tile + tl.arange(0, layout.tile)
    query = row // layout.heads
    real = query < count
    place = (tl.load(tile + 1) + query).to(tl.int64) * layout.heads + row % layout.heads
    table = tables + slot.to(tl.int64) * table_stride
    first, edge = low // layout.keys * layout.keys, first_row(firsts, slot)
    accs, total, _ = _over_rows(
        q, place, real, query[:, None], pool, table, start, low, edge, first, start + count, scale, 0, layout
    )
    column = tl.arange(0, layout.piece)
    for i in tl.static_range(layout.latent // layout.piece):
        out_at = out + place[:, None] * layout.latent + i * layout.piece + column[None, :]
        tl.store(out_at, (accs[i] / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def _over_rows(
    q, place, real, sees, pool, table, start, low, edge, first, last, scale, queries, layout: tl.constexpr
):
    """Softmax over rows first .. last - 1 in blocks -> weighted sums float32 [tile, piece] of each piece of
    the latents, the sum of weights [tile], and base 2 lse [tile].

    place int64 [tile]: the rows of q, of which the `real` ones are there; sees [tile, 1]: a query's own row
    after `start`, or its mask, or the address of the first of its mask's words, which lie `queries` apart;
    low: the first row that any of them sees; of a chain, rows before `edge` are seen by themselves alone.
    """
    COUNT: tl.constexpr = layout.latent // layout.piece
    piece, rotated = tl.arange(0, layout.piece)[None, :], tl.arange(0, layout.rotated)[None, :]
    q_at = q + place[:, None] * layout.row
    q_rotated = tl.load(q_at + layout.latent + rotated, mask=real[:, None], other=0.0)
    q_pieces, accs = (), ()
    for i in tl.static_range(COUNT):
        q_pieces = q_pieces + (tl.load(q_at + i * layout.piece + piece, mask=real[:, None], other=0.0),)  # type: ignore[assignment]
        accs = accs + (tl.full([layout.tile, layout.piece], 0.0, tl.float32),)  # type: ignore[assignment]
    peak = tl.full([layout.tile], UNSEEN, tl.float32)
    total = tl.full([layout.tile], 0.0, tl.float32)
    row = first + tl.arange(0, layout.keys)
    pages = pages_of(table, row, last, layout.page_size)
    for block in range(first, last, layout.keys):
        row = block + tl.arange(0, layout.keys)
        inside = row < last
        if layout.bounded:
            inside = inside & (row >= low)
        at = pool + pages * layout.page_stride + (row % layout.page_size)[:, None] * layout.row
        pages = pages_of(table, row + layout.keys, last, layout.page_size)  # ahead of the rows they lead to
        ks = ()
        for i in tl.static_range(COUNT):
            k = tl.load(at + i * layout.piece + piece, mask=inside[:, None], other=0.0)
            ks = ks + (k.to(q.dtype.element_ty),)  # type: ignore[assignment]
        k_rotated = tl.load(at + layout.latent + rotated, mask=inside[:, None], other=0.0)
        k_rotated = k_rotated.to(q.dtype.element_ty)
        scores = tl.dot(q_rotated, tl.trans(k_rotated), input_precision="ieee")
        for i in tl.static_range(COUNT):
            scores += tl.dot(q_pieces[i], tl.trans(ks[i]), input_precision="ieee")
        scores *= scale
        if layout.bounded:
            seen = _seen(row[None, :] - start, sees, queries, layout) & inside[None, :]
            if layout.words == 0:
                seen = seen & ((row >= edge)[None, :] | (row[None, :] == start + sees))
            scores = tl.where(seen, scores, UNSEEN)
        elif block + layout.keys > start:
            seen = _seen(row[None, :] - start, sees, queries, layout) & inside[None, :]
            scores = tl.where(seen, scores, UNSEEN)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        rescale = tl.exp2(peak - new_peak)
        total = total * rescale + tl.sum(weights, 1)
        made = ()
        for i in tl.static_range(COUNT):
            share = weights.to(ks[i].dtype)
            made = made + (tl.dot(share, ks[i], accs[i] * rescale[:, None], input_precision="ieee"),)  # type: ignore[assignment]
        accs = made
        peak = new_peak
    return accs, total, peak + tl.log2(total)


@triton.jit
def _seen(after, sees, queries, layout: tl.constexpr):
    """True if a query sees the rows that stand `after` [1, keys] rows after its sequence's start."""
    if layout.words == 0:
        return after <= sees
    else:
        row = tl.minimum(tl.maximum(after, 0), layout.words * 64 - 1)
        if layout.words == 1:
            return (after < 0) | ((sees >> row) & 1 != 0)
        else:
            return (after < 0) | ((tl.load(sees + row // 64 * queries) >> row % 64) & 1 != 0)
