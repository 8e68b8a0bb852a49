"""`attend` by the exact arithmetic: a query's bits depend on its own path alone.

The columns of a sequence are shared out between programs by whole parts (`exact_parts`). The first of them
merges its own, which are the leftmost; the others leave each part as it is, and the last to arrive merges
them from left to right. Of a tree only the parts that lie wholly below its root are read by rows of several
queries; `exact_paths` reads the rest along each query's path.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eyas.engine.kernels.attention.attend import QueryRows
from eyas.engine.kernels.attention.attend_tiles import NARROW, WIDE_ROWS
from eyas.engine.kernels.attention.exact_blocks import BlockLayout, depth_of, over_columns
from eyas.engine.kernels.attention.exact_parts import (
    BLOCK,
    PartSizes,
    leave,
    left,
    merged,
    nothing,
    part_at,
    part_begin,
    part_from,
)
from eyas.engine.kernels.attention.paged import PagedKv, pages_of, scales_of
from eyas.engine.kernels.attention.scores import lowest_row, with_sink
from eyas.engine.kernels.launch.launching import call_ahead, kernel
from eyas.engine.kernels.launch.sizes import cdiv, padded_batch, power_of_2

_PROGRAMS = 512  # about four for each of 132 multiprocessors
_MOST_SHARES = 16
_REGISTERS = 128  # so that four programs of 16 rows run on a multiprocessor
SLIM = 128
"""Values of a head: of wider ones an SM has no room for tiles of 128 rows, and two sums of each."""
_AHEAD = tl.constexpr(128)  # columns that a program calls ahead
_MERGED = tl.constexpr(4)  # parts that the last program reads at once, where registers have room for them


@dataclass(frozen=True)
class ExactLaunch:
    """Memory and options that the launches of one stream share; `ExactLaunch.on` makes one.

    accs float32 [n, dim], peaks and totals float32 [n]: what programs leave of a query head's softmax over
    some parts; tickets int32, zero between kernels. pdl: programmatic dependent launch. compile_only: kernels
    are compiled and not run.
    """

    accs: torch.Tensor
    peaks: torch.Tensor
    totals: torch.Tensor
    tickets: torch.Tensor
    pdl: bool
    parts: PartSizes = field(default_factory=PartSizes)
    compile_only: bool = False

    @classmethod
    def on(
        cls,
        kv: PagedKv,
        heads: int,
        queries: int,
        pdl: bool,
        parts: PartSizes | None = None,
        shared: int | None = None,
    ) -> ExactLaunch:
        """Allocates for up to `queries` query rows, of sequences as long as their page tables allow;
        `shared`: those of the largest launch in which several programs share a sequence (None: all).
        """
        parts, device = parts or PartSizes(), kv.pool.device
        split = (queries if shared is None else min(shared, queries)) * heads
        rows = max(queries * heads, split * parts.of(kv.tables.shape[1] * kv.page_size))
        accs = torch.empty(rows, kv.dim, device=device)
        peaks, totals = torch.empty(rows, device=device), torch.empty(rows, device=device)
        tickets = torch.zeros(queries * heads, dtype=torch.int32, device=device)
        return cls(accs, peaks, totals, tickets, pdl, parts)


@dataclass(frozen=True)
class AttentionCut:
    """The division of a launch, on which no bit depends: programs of `rows` rows (queries times heads of one
    key head), at most `shares` of them for a sequence's columns. `registers`: of a thread, at most (None: as
    many as it likes); the fewer, the more programs run on a multiprocessor.
    """

    rows: int
    shares: int
    warps: int
    stages: int = 2
    registers: int | None = None

    @classmethod
    def of(cls, batch: int, rows: int, kv_heads: int, dim: int = NARROW) -> AttentionCut:
        """Divides a launch of `batch` sequences of `rows` = width * group rows a key head of `dim` values."""
        tile = min(128 if dim <= SLIM else WIDE_ROWS, max(16, power_of_2(rows)))
        programs = padded_batch(batch) * kv_heads * cdiv(rows, tile)
        shares = min(_MOST_SHARES, cdiv(_PROGRAMS, programs))
        if dim > NARROW:
            return cls(tile, shares, warps=8, stages=1)
        few = _REGISTERS if tile == 16 and dim <= SLIM else None
        return cls(tile, shares, warps=8 if tile == (128 if dim <= SLIM else WIDE_ROWS) else 4, registers=few)

    @classmethod
    def most_shared(cls, batch: int, width: int, group: int, kv_heads: int, dim: int = NARROW) -> int:
        """The most rows of a launch that `of` divides among several programs a sequence, of up to `batch`
        sequences with up to `width` query rows each.
        """
        most = 0
        for rows in range(1, width + 1):
            tiles = cdiv(rows * group, cls.of(1, rows * group, kv_heads, dim).rows)
            shared = (b for b in range(batch, 0, -1) if padded_batch(b) * kv_heads * tiles < _PROGRAMS)
            most = max(most, rows * next(shared, 0))
        return most


def layout_of(
    heads: int, kv: PagedKv, queries: QueryRows, cut: AttentionCut, launch: ExactLaunch
) -> BlockLayout:
    """Raises ValueError for a tree that does not fit into the layer's window, and for what only draft heads
    ask for: their tokens are advice, and need not have the same bits.
    """
    rule = kv.rule
    if queries.mask is not None and 0 < rule.window < queries.width:
        raise ValueError(f"a tree of {queries.width} rows does not fit into a window of {rule.window}")
    if queries.mask is not None and rule.chunk:
        raise ValueError(f"trees are not attended in chunks of {rule.chunk}")
    if queries.extent or kv.firsts is not None:
        raise ValueError("the exact arithmetic has no levels of growing trees, and no first rows of slots")
    return BlockLayout(
        width=queries.width,
        words=0 if queries.mask is None else queries.mask.shape[0],
        heads=heads,
        kv_heads=kv.kv_heads,
        dim=kv.dim,
        page_size=kv.page_size,
        page_stride=kv.pool.stride(0),
        tile=cut.rows,
        shares=cut.shares,
        pdl=launch.pdl,
        window=rule.window,
        ceiling=rule.ceiling,
        chunk=rule.chunk,
        parts=launch.parts,
    )


def attend_shared(
    q: torch.Tensor,
    kv: PagedKv,
    queries: QueryRows,
    launch: ExactLaunch,
    cut: AttentionCut,
    out: torch.Tensor,
) -> None:
    """softmax(scores of q and k) v of plain rows or chains -> out. Of a tree's queries what lies in the parts
    wholly below its root is left in the launch's memory. q [B * width, heads, dim], strided by row at most.
    """
    layout = layout_of(q.shape[1], kv, queries, cut, launch)
    masks = queries.starts if queries.mask is None else queries.mask
    where = (kv.tables, kv.tables.stride(0), queries.slots, queries.starts, masks)
    left = (launch.accs, launch.peaks, launch.totals, launch.tickets)
    args = (q, q.stride(0), kv.pool, kv.values, *where, kv.rule.sinks, out, *left, kv.rule.factor, layout)
    grid = (kv.kv_heads * layout.tiles, cut.shares, queries.slots.shape[0])
    start(_attend_shared, grid, args, cut, launch)


def start(
    kernel: Any, grid: tuple[int, int, int], args: tuple[object, ...], cut: AttentionCut, launch: ExactLaunch
) -> None:
    """Launches a kernel without fused multiply-adds, which the compiler places as it likes in each."""
    options: dict[str, Any] = {"num_warps": cut.warps, "num_stages": cut.stages, "launch_pdl": launch.pdl}
    options |= {"enable_fp_fusion": False, "maxnreg": cut.registers}
    if launch.compile_only:
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)


@kernel(do_not_specialize=["tables", "table_stride", "slots", "starts", "masks", "sinks", "tickets"])
def _attend_shared(
    q, q_stride, keys, values, tables, table_stride, slots, starts, masks,
    sinks, out, accs, peaks, totals, tickets, scale, layout: tl.constexpr,
):  # fmt: skip
    """Grid (kv_heads * tiles, shares, B): heads side by side, as they lie in a page."""
    sequence, share = tl.program_id(2), tl.program_id(1)
    if layout.pdl:
        gdc_launch_dependents()
        _prefetch(keys, values, tables, table_stride, slots, starts, layout)
        gdc_wait()
    table, start, low, end, first, last, used = _own_columns(tables, table_stride, slots, starts, layout)
    if share >= used:
        return
    head = tl.program_id(0) // layout.tiles
    row = tl.program_id(0) % layout.tiles * layout.tile + tl.arange(0, layout.tile)
    real = row < layout.rows
    query = sequence * layout.width + row // layout.group
    column = head * layout.group + row % layout.group
    dim = tl.arange(0, layout.dim)[None, :]
    q_at = q + (query.to(tl.int64) * q_stride + column * layout.dim)[:, None] + dim
    q_tile = tl.load(q_at, mask=real[:, None], other=0.0)
    own = start + row // layout.group
    if layout.tree and layout.window > 0:
        own = start + depth_of(masks + tl.where(real, query, 0), layout)
    at = head * layout.dim + dim
    place = query * layout.heads + column  # of a query head, in out and in each part
    all_heads = tl.num_programs(2) * layout.width * layout.heads
    acc, peak, total = nothing(layout.tile, layout.dim)
    acc, peak, total = over_columns(
        acc, peak, total, q_tile, own, own, keys + at, values + at, scales_of(keys, head, layout), table,
        start, low, first, last, end, scale, share > 0, accs, peaks, totals,
        place - part_at(low, layout) * all_heads, all_heads, real, layout,
    )  # fmt: skip
    if layout.tree:
        if share == 0:
            leave(accs, peaks, totals, place, acc, peak, total, real, layout)
    elif used == 1:
        write(out, place, acc / with_sink(total, peak, sinks, column)[:, None], real, layout)
    else:
        if share == 0:
            leave(accs, peaks, totals, place, acc, peak, total, real, layout)
        tl.debug_barrier()  # all threads' parts are written before the ticket is drawn
        ticket = tickets + sequence * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(ticket, 1, sem="acq_rel") == used - 1:
            acc, peak, total = from_left(accs, peaks, totals, place, real, low, end, layout)
            write(out, place, acc / with_sink(total, peak, sinks, column)[:, None], real, layout)
            tl.store(ticket, 0)


@triton.jit
def _own_columns(tables, table_stride, slots, starts, layout: tl.constexpr):
    """The sequence's page table and start; the first column that a query sees; the end of the columns that
    programs share; the program's own columns; and how many programs there are.
    """
    start = tl.load(starts + tl.program_id(2), volatile=True)  # both at once, and again after a wait
    # Before the wait this may be anything, and must still lead to a page that exists.
    start = tl.minimum(tl.maximum(start, 0), table_stride * layout.page_size - layout.width)
    slot = tl.load(slots + tl.program_id(2), volatile=True)
    low = lowest_row(None, slot, start, layout.window, layout.chunk)
    end = shared_end(start, layout)
    first_part, used, length = share_of(low, end, layout)
    begin = part_begin(first_part, layout) + tl.program_id(1) * length
    first = tl.minimum(part_begin(part_from(begin, layout), layout), end)
    last = tl.minimum(part_begin(part_from(begin + length, layout), layout), end)
    if layout.narrow:
        first = tl.maximum(first, low // BLOCK * BLOCK)
    table = tables + slot.to(tl.int64) * table_stride
    return table, start, low, end, first, last, used


@triton.jit
def _prefetch(keys, values, tables, table_stride, slots, starts, layout: tl.constexpr):
    """Calls the first part's keys and values into the L2 cache while the kernel ahead still runs.

    Only a hint: what it reads may be about to change, and is read again after the wait.
    """
    LINE: tl.constexpr = 128 // (keys.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = (layout.dim + LINE - 1) // LINE
    table, _, _, _, first, last, used = _own_columns(tables, table_stride, slots, starts, layout)
    if tl.program_id(1) < used:
        column = first + tl.arange(0, _AHEAD)
        line = tl.program_id(0) // layout.tiles * layout.dim + tl.arange(0, LINES)[None, :] * LINE
        at = pages_of(table, column, last, layout.page_size) * layout.page_stride
        at += (column % layout.page_size)[:, None] * layout.row_stride + line
        call_ahead(keys + at)
        call_ahead(values + at)


@triton.jit
def shared_end(start, layout: tl.constexpr):
    """The end of the columns that programs of several queries read: a tree's begin in the part behind."""
    if layout.tree:
        return part_begin(part_at(start, layout), layout)
    else:
        return start + layout.width


@triton.jit
def share_of(low, end, layout: tl.constexpr):
    """The part of column `low`, how many programs share the columns up to `end`, and how many each takes, but
    for the rest of its last part.
    """
    first_part = part_at(low, layout)
    span = tl.maximum(end - part_begin(first_part, layout), 0)
    length = tl.maximum(tl.cdiv(span, layout.shares), BLOCK)
    return first_part, tl.cdiv(span, length), length


@triton.jit
def from_left(accs, peaks, totals, place, real, low, end, layout: tl.constexpr):
    """The results of programs for the columns up to `end`, merged from left to right."""
    all_heads = tl.num_programs(2) * layout.width * layout.heads
    first_part, used, length = share_of(low, end, layout)
    acc, peak, total = nothing(layout.tile, layout.dim)
    if used > 0:
        acc, peak, total = left(accs, peaks, totals, place, real, layout)
        behind = part_from(part_begin(first_part, layout) + length, layout)
        at = place - first_part * all_heads
        stop = part_from(end, layout)
        if layout.tile * layout.dim > 4096:
            for part in range(behind, stop):
                one = left(accs, peaks, totals, at + part * all_heads, real, layout)
                acc, peak, total = merged(acc, peak, total, one[0], one[1], one[2])
        else:
            for part in range(behind, stop, _MERGED):
                acc, peak, total = _four(
                    acc, peak, total, accs, peaks, totals, at, all_heads, real, part, stop, layout
                )
    return acc, peak, total


@triton.jit
def _four(
    acc, peak, total, accs, peaks, totals, place, all_heads, real, part, stop, layout: tl.constexpr
):  # fmt: skip
    """The softmax so far with the next four parts, or those below `stop`: all are read, then merged."""
    a = left(accs, peaks, totals, place + part * all_heads, real, layout)
    b = left(accs, peaks, totals, place + (part + 1) * all_heads, real & (part + 1 < stop), layout)
    c = left(accs, peaks, totals, place + (part + 2) * all_heads, real & (part + 2 < stop), layout)
    d = left(accs, peaks, totals, place + (part + 3) * all_heads, real & (part + 3 < stop), layout)
    acc, peak, total = merged(acc, peak, total, a[0], a[1], a[2])
    if part + 1 < stop:
        acc, peak, total = merged(acc, peak, total, b[0], b[1], b[2])
    if part + 2 < stop:
        acc, peak, total = merged(acc, peak, total, c[0], c[1], c[2])
    if part + 3 < stop:
        acc, peak, total = merged(acc, peak, total, d[0], d[1], d[2])
    return acc, peak, total


@triton.jit
def write(out, place, result, real, layout: tl.constexpr):
    """The finished rows, rounded."""
    dim = tl.arange(0, layout.dim)[None, :]
    at = out + place.to(tl.int64)[:, None] * layout.dim + dim
    tl.store(at, result.to(out.dtype.element_ty), mask=real[:, None])
