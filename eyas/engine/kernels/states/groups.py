"""The rows of a step as layers with states read them, made of the tables on the device."""

from __future__ import annotations

import torch
import triton.language as tl

from eyas.engine.batch.sections import ALIGNMENT
from eyas.engine.batch.tables import SlotTables
from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.states.rows import StateRows
from eyas.engine.states.shape import SPAN


def decoded(
    tables: SlotTables,
    slots: torch.Tensor,
    width: int,
    first: int,
    positions: torch.Tensor,
    *,
    trees: bool = False,
) -> StateRows:
    """The rows of rounds of `width` rows, the first at row `first` of the forward: chains, as far as there
    are drafts, or `trees`, up to the last draft: what is none before it stands beside the root, and is
    nobody's parent. From here on the tables say that the states stand where they will behind the forward.

    `slots` int32 [B]; `positions` int32 [m]: of all rows of the forward.
    """
    size = slots.shape[0]
    out = slots.new_empty(6, cdiv(size, ALIGNMENT) * ALIGNMENT)
    before = positions - 1
    if trees:
        positions = positions.clone()
    _decoded[(size,)](
        *(
            slots,
            tables.length,
            tables.state,
            tables.bound,
            tables.drafts,
            tables.parents,
            out,
            before,
            positions,
        ),
        *(out.shape[1], tables.padding_slot, tables.drafts.shape[1], first),
        WIDTH=width,
        BLOCK=power_of_2(width),
        SPAN_ROWS=SPAN,
        TREES=trees,
        num_warps=1,
    )
    slots, firsts, counts, starts, bounds, folds = out[:, :size]
    places = (slots, firsts, counts, starts, bounds, folds)
    return StateRows(*places, before, positions, width, trees=trees)


@kernel(do_not_specialize=["first", "stride"])
def _decoded(
    slots, length, state, bound, drafts, parents, out, before, positions,
    stride, padding, drafts_stride, first,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPAN_ROWS: tl.constexpr, TREES: tl.constexpr,
):  # fmt: skip
    """Grid (B). `out` [6, stride]: slots, firsts, counts, starts, bounds, folds."""
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence)
    real = slot != padding
    start = tl.load(length + slot)
    fold = start // SPAN_ROWS * SPAN_ROWS
    node = tl.arange(0, BLOCK)
    draft = tl.load(drafts + slot * drafts_stride + node, mask=node < WIDTH - 1, other=-1)
    if TREES:
        rows = 1 + tl.max(tl.where(draft < 0, 0, node + 1), 0)
        above = tl.load(parents + slot * drafts_stride + node, mask=node < WIDTH - 1, other=-1)
        row, inside = first + sequence * WIDTH + node + 1, real & (node < WIDTH - 1)
        tl.store(before + row, tl.where(draft < 0, start - 1, start + 1 + above), mask=inside)
        tl.store(positions + row, start, mask=inside & (draft < 0))
        tl.store(before + row - 1, start - 1, mask=real & (node == 0))
    else:
        rows = 1 + tl.min(tl.where(draft < 0, node, BLOCK), 0)
    rows = tl.where(real, tl.minimum(rows, WIDTH), 0)
    out += sequence
    tl.store(out, tl.where(real, tl.load(state + slot), 0))
    tl.store(out + stride, first + sequence * WIDTH)
    tl.store(out + 2 * stride, rows)
    tl.store(out + 3 * stride, tl.where(real, start, 0))
    tl.store(out + 4 * stride, tl.where(real, tl.load(bound + slot), 0))
    tl.store(out + 5 * stride, tl.where(real, fold, 0))
    tl.store(bound + slot, fold, mask=real)
