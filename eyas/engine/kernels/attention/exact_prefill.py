"""`attend_chunks` by the exact arithmetic: a prompt's row has the bits of a plain row at its place.

A program goes through the parts of `exact_parts` one after another and merges each as soon as it is done, as
the programs of plain rows do together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from eyas.engine.kernels.attention.attend_tiles import NARROW, WIDE_ROWS
from eyas.engine.kernels.attention.exact_attend import SLIM, write
from eyas.engine.kernels.attention.exact_blocks import BlockLayout, over_columns
from eyas.engine.kernels.attention.exact_parts import BLOCK, PartSizes, nothing
from eyas.engine.kernels.attention.paged import PagedKv, scales_of
from eyas.engine.kernels.attention.prefill import TILE
from eyas.engine.kernels.attention.scores import lowest_row, with_sink
from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import cdiv


@dataclass(frozen=True)
class ChunkCut:
    """A program takes `rows` rows (queries times heads of one key head), some of a tile's or all; no bit
    depends on it.
    """

    rows: int = TILE
    warps: int = 8
    stages: int = 3
    parts: PartSizes = PartSizes()

    @classmethod
    def of(cls, dim: int) -> ChunkCut:
        """The division of heads of `dim` values."""
        if dim <= SLIM:
            return cls()
        return cls(TILE // 2, stages=2) if dim <= NARROW else cls(WIDE_ROWS, stages=1)


def attend_chunks_exactly(
    q: torch.Tensor,
    kv: PagedKv,
    tiles: torch.Tensor,
    cut: ChunkCut | None = None,
    compile_only: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scores of q and k) v of q [C, heads, dim], strided by row at most -> `out`, or one like it.

    `tiles` int32 [T, 4] as `prefill.attend_chunks` takes them. compile_only: the kernel is compiled and not
    run.
    """
    cut, heads = cut or ChunkCut.of(kv.dim), q.shape[1]
    layout = BlockLayout(
        width=0,
        words=0,
        heads=heads,
        kv_heads=kv.kv_heads,
        dim=kv.dim,
        page_size=kv.page_size,
        page_stride=kv.pool.stride(0),
        tile=cut.rows,
        shares=1,
        pdl=False,
        window=kv.rule.window,
        ceiling=kv.rule.ceiling,
        chunk=kv.rule.chunk,
        parts=cut.parts,
    )
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    where = (kv.tables, kv.tables.stride(0), tiles)
    args = (q, q.stride(0), kv.pool, kv.values, *where, kv.rule.sinks, out, kv.rule.factor, layout)
    programs = cdiv(TILE // layout.group, cut.rows // layout.group)  # each takes whole queries
    grid = (kv.kv_heads, tiles.shape[0], programs)
    options = {"num_warps": cut.warps, "num_stages": cut.stages, "enable_fp_fusion": False}
    if compile_only:
        _attend_chunks.warmup(*args, grid=grid, **options)
    else:
        _attend_chunks[grid](*args, **options)
    return out


@kernel(do_not_specialize=["tables", "table_stride", "tiles", "sinks"])
def _attend_chunks(
    q, q_stride, keys, values, tables, table_stride, tiles, sinks, out, scale, layout: tl.constexpr
):  # fmt: skip
    """Grid (kv_heads, T, programs of a tile)."""
    head = tl.program_id(0)
    tile = tiles + 4 * tl.program_id(1)
    skipped = tl.program_id(2) * (layout.tile // layout.group)  # queries of the programs before
    count = tl.load(tile + 3) - skipped
    if count <= 0:
        return
    start = tl.load(tile + 2) + skipped
    slot = tl.load(tile)
    table = tables + slot.to(tl.int64) * table_stride
    row = tl.arange(0, layout.tile)
    query = row // layout.group
    column = head * layout.group + row % layout.group
    count = tl.minimum(count, layout.tile // layout.group)
    real = query < count
    dim = tl.arange(0, layout.dim)[None, :]
    place = (tl.load(tile + 1) + skipped + query).to(tl.int64)
    q_at = q + (place * q_stride + column * layout.dim)[:, None] + dim
    q_tile = tl.load(q_at, mask=real[:, None], other=0.0)
    own, end = start + query, start + count
    at = head * layout.dim + dim
    low = lowest_row(None, slot, start, layout.window, layout.chunk)
    first = low // BLOCK * BLOCK
    acc, peak, total = nothing(layout.tile, layout.dim)
    acc, peak, total = over_columns(
        acc, peak, total, q_tile, own, own, keys + at, values + at, scales_of(keys, head, layout), table,
        start, low, first, end, end, scale, False, None, None, None, own, 0, real, layout,
    )  # fmt: skip
    acc /= with_sink(total, peak, sinks, column)[:, None]
    write(out, place * layout.heads + column, acc, real, layout)
