"""Attention of a few query rows per sequence over the paged pool: plain decode, chains and trees.

Split-KV (Flash-Decoding, Dao et al. 2023): a sequence's keys are cut into parts of equal length, one per
program; the program that arrives last adds the parts up in their order, so that results do not depend on
which was last. The host knows upper bounds only: lengths are read on the device, and the grid follows from
the shapes of the tensors alone. A few shares of programs are spare: those of the first sequences that are
much longer than most take them, for else a step would wait for one long sequence among short ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eyas.engine.kernels.attention import attend_tiles
from eyas.engine.kernels.attention.attend_masks import lowest_of, masked
from eyas.engine.kernels.attention.attend_scaled import over_scaled_part
from eyas.engine.kernels.attention.attend_tiles import (
    AttentionTiling,
    merged_parts,
    most_parts,
    tiling_of,
    within,
)
from eyas.engine.kernels.attention.paged import PagedKv, pages_of
from eyas.engine.kernels.attention.scores import first_row, lowest_row, tanh, with_sink
from eyas.engine.kernels.attention.softmax import UNSEEN
from eyas.engine.kernels.launch.launching import call_ahead, kernel
from eyas.engine.kernels.launch.sizes import padded_batch


@dataclass(frozen=True)
class QueryRows:
    """`width` query rows for each of B sequences: query j of sequence b is row b * width + j of q.

    slots int32 [B]: the sequence's page table; starts int32 [B]: query j stands at logical row starts[b] + j,
    whose key and value are already in the pool. Every query sees the rows below starts[b]. Without `mask` it
    also sees those up to its own; with `mask` int64 [words, B, width] it sees row starts[b] + r where bit
    r % 64 of mask[r // 64, b, j] is set (a query's own bit is set by the caller). `extent`: rows from
    starts[b] on that are there (None: `width`); a level of a growing tree sees those of the levels above it
    as well. A window is counted along the query's path; one that is shorter than a tree's extent is refused.

    Padding names a slot whose page table is all zeros, and start 0: its results are finite and mean nothing.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    width: int
    mask: torch.Tensor | None = None
    extent: int | None = None


@dataclass(frozen=True)
class AttentionLaunch:
    """Memory and options that the launches of one stream share; `AttentionLaunch.on` makes one.

    parts float32 [n, dim], lses float32 [n]: what programs leave for the last of them, a query head's result
    over a part and the base 2 logarithm of its sum of exponentials; tickets int32, zero between kernels.
    pdl: programmatic dependent launch, for streams in which every kernel so launched waits before it touches
    what others may. compile_only: the kernel is compiled and not run.
    """

    parts: torch.Tensor
    lses: torch.Tensor
    tickets: torch.Tensor
    pdl: bool
    compile_only: bool = False

    @classmethod
    def on(cls, kv: PagedKv, heads: int, batch: int, width: int, pdl: bool) -> AttentionLaunch:
        """Allocates for up to `batch` sequences of up to `width` queries, as `tiling_of` cuts them."""
        group, device = heads // kv.kv_heads, kv.pool.device
        rows = max(
            w * heads * _left(b, tiling_of(b, w * group, kv.kv_heads, dim=kv.dim))
            for b in range(1, batch + 1)
            for w in range(1, width + 1)
        )
        return cls(
            parts=torch.empty(rows, kv.dim, device=device),
            lses=torch.empty(rows, device=device),
            tickets=torch.zeros(batch * width * heads, dtype=torch.int32, device=device),
            pdl=pdl,
        )


def _left(batch: int, tiling: AttentionTiling) -> int:
    """The parts that all programs of a query head leave, of `batch` sequences cut like that."""
    return batch * tiling.parts + tiling.spare * (most_parts(tiling.rows) - tiling.parts)


@dataclass(frozen=True)
class _AttendLayout:
    """The kernel's compile-time parameters."""

    width: int
    extent: int
    words: int
    heads: int
    kv_heads: int
    dim: int
    share: int
    page_size: int
    page_stride: int
    tile: int
    keys: int
    most_parts: int
    pdl: bool
    window: int
    bounded: bool
    ceiling: float
    chunk: int
    spare: int

    @property
    def narrow(self) -> bool:
        """True if there are rows before a sequence's end that its queries do not see."""
        return self.window > 0 or self.chunk > 0 or self.bounded

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        return self.width * self.group

    @property
    def tiles(self) -> int:
        return -(-self.rows // self.tile)

    @property
    def long(self) -> int:
        """Keys: a sequence with twice as many may have a spare share."""
        return attend_tiles.LONG

    @property
    def merged_rows(self) -> int:
        """The number of rows whose parts the last program holds at a time: 64 numbers a thread of
        four warps.
        """
        return max(1, 8192 // (self.most_parts * self.dim))

    @property
    def row_stride(self) -> int:
        return self.kv_heads * self.share


def attend(
    q: torch.Tensor,
    kv: PagedKv,
    queries: QueryRows,
    launch: AttentionLaunch,
    tiling: AttentionTiling | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scores of q and k) v of q [B * width, heads, dim], strided by row at most -> `out`, if given.

    Raises ValueError for a tree that does not fit into the layer's window.
    """
    batch, heads = queries.slots.shape[0], q.shape[1]
    rows = queries.width * heads // kv.kv_heads
    key_bytes = kv.dim * kv.pool.element_size()
    if tiling is None:
        tiling = tiling_of(batch, rows, kv.kv_heads, key_bytes, kv.scaled, kv.dim)
        tiling = within(tiling, kv.rule.window, padded_batch(batch) * kv.kv_heads)
    layout = _layout(heads, kv, queries, tiling, launch.pdl)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    args = (
        q,
        q.stride(0),
        kv.pool,
        kv.values,
        kv.tables,
        kv.tables.stride(0),
        queries.slots,
        queries.starts,
        kv.firsts,
        kv.rule.sinks,
        queries.starts if queries.mask is None else queries.mask,
        out,
        launch.parts,
        launch.lses,
        launch.tickets,
        kv.rule.factor,
        layout,
    )
    grid = (kv.kv_heads * layout.tiles, tiling.parts, layout.spare + batch)
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages, "launch_pdl": launch.pdl}
    if launch.compile_only:
        _attend.warmup(*args, grid=grid, **options)
    else:
        _attend[grid](*args, **options)
    return out


def _layout(heads: int, kv: PagedKv, queries: QueryRows, tiling: AttentionTiling, pdl: bool) -> _AttendLayout:
    rule, extent = kv.rule, queries.extent or queries.width
    if queries.mask is not None and rule.chunk:
        raise ValueError(f"trees are not attended in chunks of {rule.chunk}")
    if queries.mask is not None and 0 < rule.window < extent:
        raise ValueError(f"a tree of {extent} rows does not fit into a window of {rule.window}")
    return _AttendLayout(
        width=queries.width,
        extent=extent,
        words=0 if queries.mask is None else queries.mask.shape[0],
        heads=heads,
        kv_heads=kv.kv_heads,
        dim=kv.dim,
        share=kv.share,
        page_size=kv.page_size,
        page_stride=kv.pool.stride(0),
        tile=tiling.rows,
        keys=tiling.keys,
        most_parts=merged_parts(tiling),
        pdl=pdl,
        window=rule.window,
        bounded=kv.firsts is not None,
        ceiling=rule.ceiling,
        chunk=rule.chunk,
        spare=0 if rule.window or rule.chunk or kv.firsts is not None else tiling.spare,
    )


@kernel(
    do_not_specialize=["tables", "table_stride", "slots", "starts", "firsts", "sinks", "masks", "tickets"]
)
def _attend(
    q, q_stride, keys, values, tables, table_stride, slots, starts, firsts, sinks, masks, out, parts, lses,
    tickets, scale, layout: tl.constexpr,
):  # fmt: skip
    """Grid (kv_heads * tiles, parts, spare + B): heads side by side, as they lie in a page."""
    if layout.pdl:
        gdc_launch_dependents()
        _prefetch(keys, values, tables, table_stride, slots, starts, firsts, layout)
        gdc_wait()
    sequence, part, table, start, low, edge, first, last, used = _part_of(
        tables, table_stride, slots, starts, firsts, layout
    )
    if part >= used:
        return
    head = tl.program_id(0) // layout.tiles
    row = tl.program_id(0) % layout.tiles * layout.tile + tl.arange(0, layout.tile)
    real = row < layout.rows
    query = sequence * layout.width + row // layout.group
    column = head * layout.group + row % layout.group
    dim = tl.arange(0, layout.dim)[None, :]
    q_at = q + (query.to(tl.int64) * q_stride + column * layout.dim)[:, None] + dim
    q_tile = tl.load(q_at, mask=real[:, None], other=0.0)
    sees = row // layout.group
    if layout.words == 1:
        sees = tl.load(masks + query, mask=real, other=0)
    elif layout.words > 0:
        sees = masks + tl.where(real, query, 0)  # an address: no register has room for all words
    at = head * layout.share + dim
    if keys.dtype.element_ty == tl.float8e4nv:
        acc, lse = over_scaled_part(
            q_tile, sees[:, None], keys, head, table, start, low, edge, first, last, scale, layout
        )
    else:
        acc, lse = _over_part(
            q_tile, sees[:, None], keys + at, values + at, table, start, low, edge, first, last, scale, layout
        )
    place = query * layout.heads + column  # of a query head, in out and in each part
    if used == 1:
        if sinks is not None:  # beside a softmax whose weights' sum is 1
            acc /= with_sink(tl.full([layout.tile], 1.0, tl.float32), lse, sinks, column)[:, None]
        tl.store(
            out + place.to(tl.int64)[:, None] * layout.dim + dim,
            acc.to(out.dtype.element_ty),
            mask=real[:, None],
        )
        return
    left = _left_at(part, layout) + place
    tl.store(lses + left, lse, mask=real)
    tl.store(parts + left.to(tl.int64)[:, None] * layout.dim + dim, acc, mask=real[:, None])
    tl.debug_barrier()  # all threads' parts are written before the ticket is drawn
    ticket = tickets + sequence * tl.num_programs(0) + tl.program_id(0)
    if tl.atomic_add(ticket, 1, sem="acq_rel") == used - 1:
        _merge(parts, lses, out, sinks, sequence, used, layout)
        tl.store(ticket, 0)


@triton.jit
def _left_at(part, layout: tl.constexpr):
    """Where a part of the first query head lies: those beyond the usual ones are of `spare` sequences."""
    heads = layout.width * layout.heads
    usual = tl.num_programs(1)
    more = tl.maximum(part - usual, 0)
    return tl.minimum(part, usual) * (tl.num_programs(2) - layout.spare) * heads + more * layout.spare * heads


@triton.jit
def _share_of(starts, most, layout: tl.constexpr):
    """The program's sequence, the share of it that the program is in, and how many there are: of the first
    sequences, which are the longest, as many as their keys are those of the next one behind them. A spare
    share that none of them has is behind the last one of its sequence.
    """
    sequence, share, shares = tl.program_id(2), 0, 1
    if layout.spare > 0:
        one = tl.arange(0, layout.spare)
        lengths = tl.minimum(tl.load(starts + one, volatile=True), most)
        usual = tl.minimum(tl.load(starts + layout.spare, volatile=True), most)
        more = tl.minimum(lengths // tl.maximum(usual, layout.long), layout.most_parts // tl.num_programs(1))
        ends = tl.cumsum(tl.maximum(more - 1, 0), 0)
        begins = tl.minimum(ends - tl.maximum(more - 1, 0), layout.spare)
        ends = tl.minimum(ends, layout.spare)
        taken = tl.sum((ends <= tl.program_id(2)).to(tl.int32), 0)
        sequence = tl.where(sequence < layout.spare, taken, sequence - layout.spare)
        own = one == sequence
        shares = 1 + tl.sum(tl.where(own, ends - begins, 0), 0)
        if tl.program_id(2) < layout.spare:
            share = 1 + tl.program_id(2) - tl.sum(tl.where(own, begins, 0), 0)
    return sequence, share, shares


@triton.jit
def _part_of(tables, table_stride, slots, starts, firsts, layout: tl.constexpr):
    """The program's sequence and part, the sequence's page table and start, the first rows that a query sees
    and that others see, the program's rows first .. last - 1, and the number of parts.

    Parts beyond that have nothing to do, and no program waits for them.
    """
    # Before the wait lengths may be anything, and must still lead to pages that exist.
    most = table_stride * layout.page_size - layout.extent
    sequence, share, shares = _share_of(starts, most, layout)
    part = share * tl.num_programs(1) + tl.program_id(1)
    start = tl.load(starts + sequence, volatile=True)  # both at once, and again after a wait
    start = tl.minimum(tl.maximum(start, 0), most)
    slot = tl.load(slots + sequence, volatile=True)
    end = start + layout.extent
    low, edge = lowest_row(firsts, slot, start, layout.window, layout.chunk), first_row(firsts, slot)
    begin = low // layout.keys * layout.keys
    length = tl.cdiv(tl.cdiv(end - begin, shares * tl.num_programs(1)), layout.keys) * layout.keys
    first = begin + part * length
    table = tables + slot.to(tl.int64) * table_stride
    last, used = tl.minimum(first + length, end), tl.cdiv(end - begin, length)
    return sequence, part, table, start, low, edge, first, last, used


@triton.jit
def _prefetch(keys, values, tables, table_stride, slots, starts, firsts, layout: tl.constexpr):
    """Calls the first block of keys and values into the L2 cache while the kernel ahead still runs.

    Only a hint: what it reads may be about to change, and is read again after the wait.
    """
    LINE: tl.constexpr = 128 // (keys.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = (layout.dim + LINE - 1) // LINE
    _, _, table, _, _, _, first, last, _ = _part_of(tables, table_stride, slots, starts, firsts, layout)
    row = first + tl.arange(0, layout.keys)
    line = tl.program_id(0) // layout.tiles * layout.share + tl.arange(0, LINES)[None, :] * LINE
    at = pages_of(table, row, last, layout.page_size) * layout.page_stride
    at += (row % layout.page_size)[:, None] * layout.row_stride + line
    call_ahead(keys + at)
    call_ahead(values + at)


@triton.jit
def _over_part(q_tile, sees, keys, values, table, start, low, edge, first, last, scale, layout: tl.constexpr):
    """Softmax over rows first .. last - 1 in blocks -> result float32 [tile, dim], base 2 lse [tile].

    keys and values point at [1, dim] of the pool's first row; low is the first row that any of the queries
    sees; `sees` and `edge` as of `lowest_of`.
    """
    peak = tl.full([layout.tile], UNSEEN, tl.float32)
    total = tl.full([layout.tile], 0.0, tl.float32)
    acc = tl.full([layout.tile, layout.dim], 0.0, tl.float32)
    lowest = lowest_of(sees, start, low, edge, layout)
    row = first + tl.arange(0, layout.keys)
    pages = pages_of(table, row, last, layout.page_size)
    for block in range(first, last, layout.keys):
        row = block + tl.arange(0, layout.keys)
        inside = row < last
        if layout.narrow:
            inside = inside & (row >= low)
        at = pages * layout.page_stride + (row % layout.page_size)[:, None] * layout.row_stride
        pages = pages_of(table, row + layout.keys, last, layout.page_size)  # ahead of the rows they lead to
        k = tl.load(keys + at, mask=inside[:, None], other=0.0)
        v = tl.load(values + at, mask=inside[:, None], other=0.0)
        scores = tl.dot(q_tile, tl.trans(k), input_precision="ieee") * scale
        if layout.ceiling > 0:
            scores = tanh(scores) * layout.ceiling
        scores = masked(scores, row, inside, sees, lowest, start, block, layout)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        rescale = tl.exp2(peak - new_peak)
        total = total * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        peak = new_peak
    return acc / total[:, None], peak + tl.log2(total)


@triton.jit
def _merge(parts, lses, out, sinks, sequence, used, layout: tl.constexpr):
    """Adds up the `used` parts of the program's rows, a few rows at a time."""
    STEP: tl.constexpr = layout.merged_rows
    part = tl.arange(0, layout.most_parts)[None, :]
    dim = tl.arange(0, layout.dim)
    left = _left_at(part, layout)
    first = tl.program_id(0) % layout.tiles * layout.tile
    for begin in range(first, min(first + layout.tile, layout.rows), STEP):
        row = begin + tl.arange(0, STEP)
        query = sequence * layout.width + row // layout.group
        column = tl.program_id(0) // layout.tiles * layout.group + row % layout.group
        place = query * layout.heads + column
        real = row < layout.rows
        there = real[:, None] & (part < used)
        at = left + place[:, None]
        lse = tl.load(lses + at, mask=there, other=UNSEEN, cache_modifier=".cg")
        x_at = parts + at.to(tl.int64)[:, :, None] * layout.dim + dim
        x = tl.load(x_at, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        peak = tl.max(lse, 1)
        weight = tl.exp2(lse - peak[:, None])
        weight /= with_sink(tl.sum(weight, 1), peak, sinks, column)[:, None]
        result = tl.sum(x * weight[:, :, None], 1).to(out.dtype.element_ty)
        tl.store(out + place.to(tl.int64)[:, None] * layout.dim + dim, result, mask=real[:, None])
