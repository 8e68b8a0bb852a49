"""The rows of a block of drafts that a head makes in one pass, behind each sequence's certain rows.

The specification is `eyas.engine.speculation.draft_worker.draft_runner`, with the tokens of
`eyas.engine.checkpoint.config.DraftBlock`.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from eyas.engine.checkpoint.config import DraftBlock
from eyas.engine.kernels.drafts.rounds import (
    LANES,
    PLAIN,
    RoundBatch,
    RoundRows,
    physical_rows,
    store_rows,
)
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv


def lay(
    batch: RoundBatch, block: DraftBlock, rows: RoundRows, mask: Tensor, scored: Tensor | None = None
) -> None:
    """Writes `rows`, as many for each of B sequences, from its root token's row on.

    `mask` int64 [1, B, width <= 63] receives the rows that each one sees of its sequence's: those of the
    block, or up to its own if it is causal. A sequence whose drafts, or whose pages, end above has a shorter
    block; the other rows are empty, and no row of the block sees them. `scored` int32 [B * drafts], if it is
    given, receives the numbers of the rows that drafts come of.
    """
    tables = batch.tables
    _, _, width = mask.shape
    _lay[(cdiv(batch.size * width, LANES),)](
        *(batch.slots, tables.length, tables.root, tables.speculative, tables.pages),
        *(rows.tensors, mask, scored),
        *(batch.size * width, block.mask_token, tables.padding_slot, tables.pages.shape[1]),
        ROOTED=block.rooted,
        CAUSAL=block.causal,
        FIRST=block.first,
        WIDTH=width,
        PAGE_SIZE=batch.page_size,
        BLOCK=LANES,
        PDL=batch.pdl,
        num_warps=LANES // 32,
        launch_pdl=batch.pdl,
    )


@kernel(do_not_specialize=(*PLAIN, "slots", "block_mask", "scored", "mask_token"))
def _lay(
    slots,
    length,
    root,
    speculative,
    pages,
    out,
    block_mask,
    scored,
    rows,
    mask_token,
    padding,
    max_pages,
    ROOTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    sequence, place = row // WIDTH, row % WIDTH
    slot = tl.load(slots + sequence, mask=inside, other=padding)
    start = tl.load(length + slot)
    live = inside & (slot != padding)
    drafts = tl.load(speculative + slot, mask=live, other=0)
    room = tl.minimum(max_pages * PAGE_SIZE - start, WIDTH)  # up to the end of the page table
    count = tl.where(drafts > 0, tl.minimum(drafts + FIRST, room), 0)
    token = tl.full([BLOCK], 0, tl.int32) + mask_token
    if ROOTED:
        token = tl.where(place == 0, tl.load(root + slot), token)
    kv_row = physical_rows(pages, slot, start + place, live & (place < count), max_pages, PAGE_SIZE)
    store_rows(out, row, token, start + place, kv_row, inside)
    tl.store(out[3] + sequence, start, mask=inside & (place == 0))
    seen = tl.minimum(place + 1, count) if CAUSAL else count
    one = tl.full([BLOCK], 1, tl.int64)
    tl.store(block_mask + row, (one << seen.to(tl.int64)) - 1, mask=inside)
    if scored is not None:
        draft = sequence * (WIDTH - FIRST) + place - FIRST
        tl.store(scored + draft, row, mask=inside & (place >= FIRST))
