"""Causal attention of prompt chunks over the paged pool, a tile of consecutive query rows per program.

The query heads that share a key head are rows of one matrix product (FlashAttention, Dao et al. 2022, with
grouped queries packed), so that a block of keys is read once for all of them. Where the tiles are is read on
the device; the grid follows from the number of tiles and rows alone. Where these are too few for a GPU, the
keys of long sequences are cut into parts, which a launch behind adds up in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.attention.attend_tiles import NARROW
from eyas.engine.kernels.attention.paged import PagedKv, keys_at_a_time, pages_of, read_rows, scales_of
from eyas.engine.kernels.attention.scores import first_row, lowest_row, tanh, with_sink
from eyas.engine.kernels.attention.softmax import UNSEEN
from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2


@dataclass(frozen=True)
class ChunkTiling:
    """A program takes `rows` rows (queries times heads of one key head), its keys `keys` at a time;
    `programs` of them share a tile's queries. `beside`: rounds attend beside them.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int = 1
    beside: bool = False


TILE = 128
"""Rows of a tile's queries, whatever the heads."""

_LONG = 512  # bytes of a key in float32
_PROGRAMS, _MOST_PARTS = 132, 8  # about as many as a Hopper GPU has SMs
_FEW_WARPS = 4  # of programs two of which an SM has at a time
_LEFT = 168  # of small programs, which leave rounds beside them room
_WAVES = 4  # of programs with wide heads, padding among them; if they are not all there at once
_LEAST, _LEAST_WIDE = 8, 16  # blocks of a part
_SLIM = 128  # values of a head that is not wide
_MANY_KEYS = 64


def chunk_tiling(key_bytes: int = 256, dim: int = NARROW) -> ChunkTiling:
    """The tiling for keys of `dim` values in `key_bytes` bytes."""
    keys = keys_at_a_time(key_bytes)
    if key_bytes == 4 * dim >= _LONG:  # no matrix unit has float32: its products are written out
        return ChunkTiling(32, 16, warps=8, stages=2)
    if dim <= NARROW:  # of 32 keys at a time the queries, which are read for each, would bind it
        return ChunkTiling(TILE, _MANY_KEYS, warps=8, stages=3 if keys == _MANY_KEYS else 2)
    if key_bytes == 2 * dim:
        return ChunkTiling(64, keys, warps=8, stages=3)
    return ChunkTiling(32, keys, warps=8, stages=2)


def tiling_for(
    kv: PagedKv, group: int, queries: int = 0, count: int = 0, *, beside: bool = False
) -> ChunkTiling:
    """The tiling for keys of `kv`, each of which has `group` heads, and tiles of up to `queries` queries (0:
    as many as `tile_rows` says). `count`: of all rows, if known. Rows so few that a GPU runs two parts of all
    their keys at once are given to more and smaller programs; more were faster whole. `beside`: rounds
    attend meanwhile.
    """
    key_bytes = kv.dim * kv.pool.element_size()
    tiling = chunk_tiling(key_bytes, kv.dim)
    programs = kv.kv_heads * cdiv(count * group, TILE)
    if key_bytes == 2 * kv.dim == 256 and 0 < 2 * programs <= _PROGRAMS:
        tiling = replace(tiling, rows=TILE // 2, warps=_FEW_WARPS)
    rows = max(tiling.rows, power_of_2(group))
    programs = cdiv(queries or TILE // group, rows // group)
    return replace(tiling, rows=rows, programs=programs, beside=beside)


@dataclass(frozen=True)
class _PrefillLayout:
    """The kernel's compile-time parameters."""

    heads: int
    kv_heads: int
    dim: int
    share: int
    page_size: int
    page_stride: int
    tile: int
    keys: int
    window: int
    bounded: bool
    ceiling: float
    chunk: int
    programs: int
    split: bool

    @property
    def cache_key(self) -> str:
        """The key by which Triton keeps compiled kernels; of itself it would not see other numbers below."""
        return f"{self} {self.least} {self.slice}"

    @property
    def least(self) -> int:
        """Blocks of a part, of which there may be fewer than programs."""
        return _LEAST if self.dim <= _SLIM else _LEAST_WIDE

    @property
    def slice(self) -> int:
        """Rows of a tile whose parts a program adds up."""
        return min(16, self.tile)

    @property
    def narrow(self) -> bool:
        """True if there are rows before a query's own that it does not see."""
        return self.window > 0 or self.chunk > 0 or self.bounded

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def row_stride(self) -> int:
        return self.kv_heads * self.share


def tile_rows(heads: int, kv_heads: int, rows: int = TILE) -> int:
    """The most query rows of one tile of `rows` rows, for callers that cut chunks into tiles."""
    return rows // (heads // kv_heads)


def attend_chunks(
    q: torch.Tensor,
    kv: PagedKv,
    tiles: torch.Tensor,
    tiling: ChunkTiling | None = None,
    compile_only: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scores of q and k) v of q [C, heads, dim], strided by row at most -> `out`, or one like it.

    tiles int32 [T, 4]: (slot, first row within q, logical row of that first query, count <= tile_rows). A
    query sees its slot's rows up to its own (a window's last), which are already in the pool. A tile of count
    0 does nothing; rows that no tile names hold anything. Programs start in the order of the tiles.
    compile_only: the kernel is compiled and not run.
    """
    rule, group = kv.rule, q.shape[1] // kv.kv_heads
    tiling = tiling or tiling_for(kv, group)
    parts = _parts(kv, tiling, tiles.shape[0], q.shape[0] * group)
    layout = _PrefillLayout(
        heads=q.shape[1],
        kv_heads=kv.kv_heads,
        dim=kv.dim,
        share=kv.share,
        page_size=kv.page_size,
        page_stride=kv.pool.stride(0),
        tile=tiling.rows,
        keys=tiling.keys,
        window=rule.window,
        bounded=kv.firsts is not None,
        ceiling=rule.ceiling,
        chunk=rule.chunk,
        programs=tiling.programs,
        split=parts > 1 or (tiling.warps == _FEW_WARPS and _sees_all(kv)),
    )
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    made, sums = out, out
    if layout.split:
        made = torch.empty(parts, *q.shape, dtype=torch.float32, device=q.device)
        sums = torch.empty(parts, *q.shape[:2], dtype=torch.float32, device=q.device)
    where = (kv.pool, kv.values, kv.tables, kv.tables.stride(0), kv.firsts, rule.sinks, tiles)
    args = (q, q.stride(0), *where, out, made, sums, q.shape[0], rule.factor, layout)
    grid = (kv.kv_heads, tiles.shape[0], tiling.programs * parts)
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    if compile_only:
        _attend_chunks.warmup(*args, grid=grid, **options)
    else:
        _attend_chunks[grid](*args, **options)
        if parts > 1:
            slices = tiling.programs * cdiv(layout.tile, layout.slice)
            _add_parts[(kv.kv_heads, tiles.shape[0], slices)](
                tiles, out, made, sums, q.shape[0], parts, layout
            )
    return out


def _parts(kv: PagedKv, tiling: ChunkTiling, tiles: int, rows: int) -> int:
    """The most parts that a tile's keys are cut into, of `rows` rows in `tiles` tiles. Tables of short
    sequences alone have few.
    """
    if not _sees_all(kv):
        return 1
    if kv.dim > _SLIM:
        padded, real = tiles * tiling.programs, cdiv(rows, tiling.rows)
        return _most_parts(max(kv.kv_heads * padded, 1), max(kv.kv_heads * real, 1))
    at_once = 2 * _PROGRAMS if tiling.warps == _FEW_WARPS else _PROGRAMS
    programs = max(kv.kv_heads * cdiv(rows, tiling.rows), 1)
    if tiling.beside and tiling.warps == _FEW_WARPS:
        at_once = min(max(_LEFT, 2 * programs), at_once)
    longest = kv.tables.shape[1] * kv.page_size // (tiling.keys * _LEAST)
    return max(min(at_once // programs, _MOST_PARTS, longest), 1)


def _sees_all(kv: PagedKv) -> bool:
    """True if a query sees all rows up to its own, else the parts of most have little to do."""
    rule = kv.rule
    return not (rule.window or rule.chunk) and rule.sinks is None and kv.firsts is None


def _most_parts(programs: int, real: int) -> int:
    """The parts of keys that attention by `programs` programs, padding included, is worth. A GPU runs one
    per multiprocessor: of 76 it is half idle. Three parts or more of all that may be `real` at once are best.
    """
    if programs >= _PROGRAMS:
        return 1
    at_once = _PROGRAMS // real
    return min(at_once if at_once > 2 else _WAVES * _PROGRAMS // programs, _MOST_PARTS)


@triton.jit
def _own_tile(tiles, program, layout: tl.constexpr):
    """A tile's first row, where that stands, and its rows: those of one of its programs."""
    tile = tiles + 4 * tl.program_id(1)
    first, start, count = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    if layout.programs > 1:
        skipped = program * (layout.tile // layout.group)  # queries of the programs before
        first, start = first + skipped, start + skipped
        count = tl.minimum(count - skipped, layout.tile // layout.group)
    return first, start, count


@triton.jit
def _parts_of(end, most, layout: tl.constexpr):
    """The blocks of keys below `end`, and the parts that they are cut into, `most` at most."""
    blocks = tl.cdiv(end, layout.keys)
    return blocks, tl.minimum(tl.maximum(blocks // layout.least, 1), most)


@kernel(do_not_specialize=["tables", "table_stride", "firsts", "sinks", "tiles", "rows"])
def _attend_chunks(
    q, q_stride, keys, values, tables, table_stride, firsts, sinks, tiles, out, made, sums, rows, scale,
    layout: tl.constexpr,
):  # fmt: skip
    """Grid (kv_heads, T, parts * programs of a tile)."""
    head = tl.program_id(0)
    tile = tiles + 4 * tl.program_id(1)
    first, start, count = _own_tile(tiles, tl.program_id(2) % layout.programs, layout)
    if count <= 0:
        return
    part, parts, begin, stop = 0, 1, 0, start + count
    if layout.split:
        blocks, parts = _parts_of(start + count, tl.num_programs(2) // layout.programs, layout)
        part = tl.program_id(2) // layout.programs
        if part >= parts:
            return
        begin = blocks * part // parts * layout.keys
        stop = tl.minimum(blocks * (part + 1) // parts * layout.keys, start + count)
    slot = tl.load(tile)
    table = tables + slot.to(tl.int64) * table_stride
    row = tl.arange(0, layout.tile)
    query = row // layout.group
    column = head * layout.group + row % layout.group
    real = (query < count)[:, None]
    dim = tl.arange(0, layout.dim)[None, :]
    place = (first + query).to(tl.int64)
    q_tile = tl.load(q + (place * q_stride + column * layout.dim)[:, None] + dim, mask=real, other=0.0)
    at = head * layout.share + dim
    low, edge = lowest_row(firsts, slot, start, layout.window, layout.chunk), first_row(firsts, slot)
    acc, peak, total = _over_rows(
        q_tile, start + query, keys + at, values + at, scales_of(keys, head, layout),
        table, low, edge, start, start + count, begin, stop, scale, layout,
    )  # fmt: skip
    acc /= with_sink(total, peak, sinks, column)[:, None]
    out_at = place * layout.heads + column
    if not layout.split or parts == 1:
        tl.store(out + out_at[:, None] * layout.dim + dim, acc.to(out.dtype.element_ty), mask=real)
    else:
        out_at += part * rows * layout.heads
        tl.store(made + out_at[:, None] * layout.dim + dim, acc, mask=real)
        tl.store(sums + out_at, peak + tl.log2(total), mask=query < count)


@kernel(do_not_specialize=["tiles", "rows", "most"])
def _add_parts(tiles, out, made, sums, rows, most, layout: tl.constexpr):
    """Grid (kv_heads, T, slices of a tile)."""
    SLICES: tl.constexpr = (layout.tile + layout.slice - 1) // layout.slice
    first, start, count = _own_tile(tiles, tl.program_id(2) // SLICES, layout)
    _, parts = _parts_of(start + count, most, layout)
    if count <= 0 or parts == 1:
        return
    row = tl.program_id(2) % SLICES * layout.slice + tl.arange(0, layout.slice)
    dim = tl.arange(0, layout.dim)[None, :]
    place = (first + row // layout.group).to(tl.int64) * layout.heads
    place += tl.program_id(0) * layout.group + row % layout.group
    real = row // layout.group < count
    peak = tl.full([layout.slice], UNSEEN, tl.float32)
    total = tl.full([layout.slice], 0.0, tl.float32)
    acc = tl.full([layout.slice, layout.dim], 0.0, tl.float32)
    for part in range(parts):
        at = place + part * rows * layout.heads
        logs = tl.load(sums + at, mask=real, other=0.0)
        new_peak = tl.maximum(peak, logs)
        share, rescale = tl.exp2(logs - new_peak), tl.exp2(peak - new_peak)
        more = tl.load(made + at[:, None] * layout.dim + dim, mask=real[:, None], other=0.0)
        acc = acc * rescale[:, None] + more * share[:, None]
        total = total * rescale + share
        peak = new_peak
    acc /= total[:, None]
    tl.store(out + place[:, None] * layout.dim + dim, acc.to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def _over_rows(
    q_tile, own, keys, values, scales, table, low, edge, start, end, begin, stop, scale, layout: tl.constexpr
):  # fmt: skip
    """Softmax over the rows from `low` up to `own` [tile], none of them beyond `end` -> weighted values
    float32 [tile, dim], the greatest scores, and the weights' sums. Rows before `edge` are seen by themselves
    alone. Of a part, whole blocks from `begin` up to `stop`.

    Blocks below `start` are seen whole and need no mask, but for those in which a window begins. keys and
    values point at [1, dim] of the pool's first row, scales at the head's first.
    """
    whole = start // layout.keys * layout.keys
    if layout.split:
        whole = tl.minimum(tl.maximum(whole, begin), stop)
    peak = tl.full([layout.tile], UNSEEN, tl.float32)
    total = tl.full([layout.tile], 0.0, tl.float32)
    acc = tl.full([layout.tile, layout.dim], 0.0, tl.float32)
    entered = begin
    if layout.narrow:
        first = low // layout.keys * layout.keys
        entered = low  # from here on every query sees every row
        if layout.window > 0:
            entered = tl.maximum(low, end - layout.window)
        if layout.chunk > 0:
            entered = tl.maximum(entered, (end - 1) // layout.chunk * layout.chunk)
        entered = tl.minimum(tl.cdiv(entered, layout.keys) * layout.keys, whole)
        peak, total, acc = _blocks(
            q_tile, own, keys, values, scales, table, low, edge, first, entered, end, scale, peak, total, acc,
            True, layout,
        )  # fmt: skip
    peak, total, acc = _blocks(
        q_tile, own, keys, values, scales, table, low, edge, entered, whole, end, scale, peak, total, acc,
        False, layout,
    )  # fmt: skip
    peak, total, acc = _blocks(
        q_tile, own, keys, values, scales, table, low, edge, whole, stop, end, scale, peak, total, acc,
        True, layout,
    )  # fmt: skip
    return acc, peak, total


@triton.jit
def _blocks(
    q_tile, own, keys, values, scales, table, low, edge, first, last, end, scale, peak, total, acc,
    MASKED: tl.constexpr, layout: tl.constexpr,
):  # fmt: skip
    """Rows first .. last - 1, in whole blocks, added to the softmax so far."""
    place = tl.arange(0, layout.keys)
    pages = pages_of(table, first + place, end, layout.page_size)
    for block in range(first, last, layout.keys):
        row = block + place
        at = pages * layout.page_stride + (row % layout.page_size)[:, None] * layout.row_stride
        here = pages
        pages = pages_of(table, row + layout.keys, end, layout.page_size)  # ahead of the rows they lead to
        if MASKED:
            inside = row < end
            if layout.narrow:
                inside = inside & (row >= low)
            k = read_rows(keys, at, scales, here, row, inside[:, None], 0, q_tile, layout)
            v = read_rows(values, at, scales, here, row, inside[:, None], 1, q_tile, layout)
        else:
            k = read_rows(keys, at, scales, here, row, None, 0, q_tile, layout)
            v = read_rows(values, at, scales, here, row, None, 1, q_tile, layout)
        scores = tl.dot(q_tile, tl.trans(k), input_precision="ieee")
        factor = scale
        if layout.ceiling > 0:
            scores = tanh(scores * scale)
            factor = layout.ceiling
        if MASKED:
            seen = row[None, :] <= own[:, None]
            if layout.narrow:
                seen = seen & inside[None, :]
            if layout.bounded:
                seen = seen & ((row >= edge)[None, :] | (row[None, :] == own[:, None]))
            if layout.window > 0:
                seen = seen & (row[None, :] > own[:, None] - layout.window)
            if layout.chunk > 0:
                seen = seen & (row[None, :] >= own[:, None] // layout.chunk * layout.chunk)
            scores = tl.where(seen, scores, UNSEEN)
        new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - new_peak[:, None])
        if MASKED and layout.narrow:  # a row that has seen nothing yet: its peak is a rounded product
            weights = tl.where(seen, weights, 0.0)
        rescale = tl.exp2(peak - new_peak)
        total = total * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        peak = new_peak
    return peak, total, acc
