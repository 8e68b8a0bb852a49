"""Queries of any kind by the exact arithmetic; of a tree, what lies behind its root, along each query's path.

In the pool a tree's nodes stand in the order of the tree. A query's own path is its column order: the node at
depth d is met in column start + d, where it would stand if its path were all there is. So programs of one
query each go from the part that holds the root onwards. `exact_parts` says how parts are added up.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eyas.engine.kernels.attention.attend import QueryRows
from eyas.engine.kernels.attention.attend_tiles import NARROW
from eyas.engine.kernels.attention.exact_attend import (
    AttentionCut,
    ExactLaunch,
    attend_shared,
    from_left,
    layout_of,
    shared_end,
    start,
    write,
)
from eyas.engine.kernels.attention.exact_blocks import depth_of, over_columns
from eyas.engine.kernels.attention.exact_parts import BLOCK, part_at, part_begin
from eyas.engine.kernels.attention.paged import PagedKv, scales_of
from eyas.engine.kernels.attention.scores import lowest_row, with_sink
from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import power_of_2

_LEAST_ROWS = 16  # of a matrix product


def attend_exactly(
    q: torch.Tensor,
    kv: PagedKv,
    queries: QueryRows,
    launch: ExactLaunch,
    cut: AttentionCut | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scores of q and k) v of q [B * width, heads, dim], strided by row at most -> `out`, if given.

    A query's bits are those of a plain row that stands where its path ends, whatever is beside it. Raises
    ValueError for a tree that does not fit into the layer's window.
    """
    batch, group = queries.slots.shape[0], q.shape[1] // kv.kv_heads
    cut = cut or AttentionCut.of(batch, queries.width * group, kv.kv_heads, kv.dim)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    attend_shared(q, kv, queries, launch, cut, out)
    if queries.mask is not None:
        _attend_paths_of(q, kv, queries, launch, cut, out)
    return out


def _attend_paths_of(
    q: torch.Tensor,
    kv: PagedKv,
    queries: QueryRows,
    launch: ExactLaunch,
    cut: AttentionCut,
    out: torch.Tensor,
) -> None:
    layout = layout_of(q.shape[1], kv, queries, cut, launch)
    rows = max(_LEAST_ROWS, power_of_2(layout.group))
    layout = replace(layout, tile=rows, paths=True)
    where = (kv.tables, kv.tables.stride(0), queries.slots, queries.starts, queries.mask)
    left = (launch.accs, launch.peaks, launch.totals)
    args = (q, q.stride(0), kv.pool, kv.values, *where, kv.rule.sinks, out, *left, kv.rule.factor, layout)
    grid = (kv.kv_heads, queries.width, queries.slots.shape[0])
    warps = 4 if kv.dim <= NARROW else cut.warps
    start(_attend_paths, grid, args, replace(cut, rows=rows, warps=warps, registers=None), launch)


@kernel(do_not_specialize=["tables", "table_stride", "slots", "starts", "masks", "sinks"])
def _attend_paths(
    q, q_stride, keys, values, tables, table_stride, slots, starts, masks,
    sinks, out, accs, peaks, totals, scale, layout: tl.constexpr,
):  # fmt: skip
    """Grid (kv_heads, width, B): the heads of one query that share a key head."""
    head, sequence = tl.program_id(0), tl.program_id(2)
    if layout.pdl:
        gdc_launch_dependents()
        gdc_wait()
    start = tl.load(starts + sequence)
    slot = tl.load(slots + sequence)
    table = tables + slot.to(tl.int64) * table_stride
    low = lowest_row(None, slot, start, layout.window, layout.chunk)
    query = sequence * layout.width + tl.program_id(1)
    row = tl.arange(0, layout.tile)
    real = row < layout.group
    place = query * layout.heads + head * layout.group + row
    dim = tl.arange(0, layout.dim)[None, :]
    q_at = q + query.to(tl.int64) * q_stride + ((head * layout.group + row) * layout.dim)[:, None] + dim
    q_tile = tl.load(q_at, mask=real[:, None], other=0.0)
    sees = masks + query
    own = start + tl.max(depth_of(sees + tl.zeros_like(row), layout))
    at = head * layout.dim + dim
    shared = shared_end(start, layout)
    acc, peak, total = from_left(accs, peaks, totals, place, real, low, shared, layout)
    first = part_begin(part_at(start, layout), layout)
    if layout.window > 0:
        first = tl.maximum(first, low // BLOCK * BLOCK)
    acc, peak, total = over_columns(
        acc, peak, total, q_tile, own + tl.zeros_like(row), sees, keys + at, values + at,
        scales_of(keys, head, layout), table, start, low, first, own + 1, start + layout.width, scale,
        False, None, None, None, row, 0, real, layout,
    )  # fmt: skip
    column = head * layout.group + row % layout.group
    write(out, place, acc / with_sink(total, peak, sinks, column)[:, None], real, layout)
