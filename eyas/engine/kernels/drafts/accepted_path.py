"""Moves data along an accepted path: KV rows to where a plain sequence has them, features to the draft head
or to where they wait for it.

The kernels run after the verdict of the same round. By then the length has grown by the tokens emitted, so
the round started at length - (a + 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from eyas.engine.kernels.drafts.rounds import (
    FACTS,
    PLAIN,
    RoundBatch,
    RoundRows,
    RoundVerdicts,
    physical_rows,
    store_rows,
)
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2

ROW_BLOCK = 512  # elements of each KV row that one program moves, for all rows of a path
FEATURE_BLOCK = 1024


@dataclass(frozen=True)
class PathRows:
    """The draft head's certain rows, P per sequence: row j pairs feature j of the path with emitted token j,
    and stands where the feature does, or `RoundBatch.behind` further.

    `features` [B * P, H]. `rows`: as a forward reads them, in the draft pool, whose pages have the target's
    numbers. `last_row` int32 [B]: the newest row, whose output gives the proposal. Rows after it are padding
    and repeat its feature, but for those of a block that the same pass drafts by.
    """

    features: Tensor
    rows: RoundRows
    last_row: Tensor


@dataclass(frozen=True)
class MaskedRows:
    """The rows of a block behind each sequence's certain rows: `count` of them at most, as many as its drafts
    need and its pages have room for. All have the token `mask_token` and the `feature` [1, H].
    """

    count: int
    mask_token: int
    feature: Tensor


def compact(batch: RoundBatch, verdicts: RoundVerdicts, pool: Tensor, pages: Tensor | None = None) -> None:
    """Moves the KV of each accepted node i from row start + path[i] to row start + i, in all layers.

    `pool` [pages, layers, fields, page_size, kv_heads, D], and behind each layer of a page of keys and values
    in FP8 their scales, which move with them. All sources are read before any row is written.
    For a chain there is nothing to move. `pages`: the page table (None: that of the first group of layers).
    """
    _, layers, fields, page_size, kv_heads, head_dim = pool.shape
    width = kv_heads * head_dim
    tables, path = batch.tables, verdicts.path
    pages = tables.pages if pages is None else pages
    _compact[(batch.size, layers * fields, cdiv(width, ROW_BLOCK))](
        batch.slots,
        tables.length,
        pages,
        verdicts.result,
        path,
        pool,
        tables.padding_slot,
        tables.pages.shape[1],
        verdicts.result.shape[1],
        PAGE_SIZE=page_size,
        LAYER_PARTS=layers * fields,
        LAYER_ROWS=pool.stride(1) // width,
        FIELDS=fields,
        HEADS=kv_heads,
        WIDTH=width,
        PATH=path.shape[1],
        PATH_BLOCK=power_of_2(path.shape[1]),
        BLOCK=ROW_BLOCK,
        PDL=batch.pdl,
        num_warps=4,
        launch_pdl=batch.pdl,
    )


@kernel(do_not_specialize=PLAIN)
def _compact(
    slots,
    length,
    pages,
    result,
    path,
    pool,
    padding,
    max_pages,
    result_stride,
    PAGE_SIZE: tl.constexpr,
    LAYER_PARTS: tl.constexpr,
    LAYER_ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PATH: tl.constexpr,
    PATH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    sequence, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + sequence)
    count = tl.load(result + sequence * result_stride)
    start = tl.load(length + slot) - count
    index = tl.arange(0, PATH_BLOCK)
    node = tl.load(path + sequence * PATH + index, mask=index < PATH, other=-1)
    moved = (slot != padding) & (node != index) & (node >= 0)
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source = physical_rows(pages, slot, start + node, moved, max_pages, PAGE_SIZE)
    target = physical_rows(pages, slot, start + index, moved, max_pages, PAGE_SIZE)
    there = (source >= 0)[:, None] & (element < WIDTH)[None, :]
    SCALED: tl.constexpr = LAYER_ROWS > FIELDS * PAGE_SIZE
    if SCALED:
        scales, heads = pool.to(tl.pointer_type(tl.float32)), tl.arange(0, triton.next_power_of_2(HEADS))
        first = (source >= 0)[:, None] & (heads < HEADS)[None, :] & (tl.program_id(2) == 0)
        from_scale = _scale_at(source, part, heads, LAYER_PARTS, LAYER_ROWS, FIELDS, HEADS, WIDTH, PAGE_SIZE)
        to_scale = _scale_at(target, part, heads, LAYER_PARTS, LAYER_ROWS, FIELDS, HEADS, WIDTH, PAGE_SIZE)
        scale = tl.load(scales + from_scale, mask=first)
    source = _row_at(source, part, LAYER_PARTS, LAYER_ROWS, FIELDS, PAGE_SIZE)
    target = _row_at(target, part, LAYER_PARTS, LAYER_ROWS, FIELDS, PAGE_SIZE)
    taken = tl.load(pool + source[:, None] * WIDTH + element[None, :], mask=there)
    tl.debug_barrier()  # another thread's target may be this one's source
    tl.store(pool + target[:, None] * WIDTH + element[None, :], taken, mask=there)
    if SCALED:
        tl.store(scales + to_scale, scale, mask=first)


@triton.jit
def _row_at(
    row, part, LAYER_PARTS: tl.constexpr, LAYER_ROWS: tl.constexpr, FIELDS: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """The place of physical rows, in one field of one layer (`part`), among all rows of the pool."""
    page, slot = (row // PAGE).to(tl.int64), row % PAGE
    if LAYER_ROWS == FIELDS * PAGE:
        place = (page * LAYER_PARTS + part) * PAGE + slot
    else:
        place = (page * (LAYER_PARTS // FIELDS) + part // FIELDS) * LAYER_ROWS + part % FIELDS * PAGE + slot
    return place


@triton.jit
def _scale_at(
    row, part, heads, LAYER_PARTS: tl.constexpr, LAYER_ROWS: tl.constexpr, FIELDS: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The places of the scales of `heads`, among all numbers of 32 bits: [rows, heads]."""
    EACH: tl.constexpr = WIDTH // HEADS // 4  # of a head, in a row of scales
    layer = (row // PAGE).to(tl.int64) * (LAYER_PARTS // FIELDS) + part // FIELDS
    number = part % FIELDS * PAGE + row % PAGE
    behind = layer * LAYER_ROWS + FIELDS * PAGE + number // EACH
    return (behind * (WIDTH // 4) + number % EACH)[:, None] + heads[None, :] * EACH


def gather_path(
    batch: RoundBatch,
    verdicts: RoundVerdicts,
    features: Tensor,
    extension: PathRows,
    below: MaskedRows | None = None,
) -> None:
    """Writes the draft head's rows after a verdict. `features` [B * W, H]: one per node of the round.

    `below`: then each sequence has P + `below.count` rows, and those of its block follow the newest.
    """
    tables, path, rows = batch.tables, verdicts.path, extension.rows
    width, masks = features.shape[1], 0 if below is None else below.count
    grid = (batch.size * (path.shape[1] + masks), cdiv(width, FEATURE_BLOCK))
    _gather_path[grid](
        batch.slots,
        tables.length,
        tables.pages,
        verdicts.result,
        path,
        features,
        extension.features,
        rows.tensors,
        extension.last_row,
        features if below is None else below.feature,
        tables.speculative,
        0 if below is None else below.mask_token,
        batch.behind,
        tables.padding_slot,
        tables.pages.shape[1],
        PAGE_SIZE=batch.page_size,
        FACTS=FACTS,
        NODES=verdicts.width,
        PATH=path.shape[1],
        MASKS=masks,
        WIDTH=width,
        BLOCK=FEATURE_BLOCK,
        PDL=batch.pdl,
        num_warps=4,
        launch_pdl=batch.pdl,
    )


@kernel(do_not_specialize=(*PLAIN, "mask_token"))
def _gather_path(
    slots,
    length,
    pages,
    result,
    path,
    features,
    gathered,
    out,
    last_row,
    mask_feature,
    speculative,
    mask_token,
    behind,
    padding,
    max_pages,
    PAGE_SIZE: tl.constexpr,
    FACTS: tl.constexpr,
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    MASKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0)
    sequence, index = row // (PATH + MASKS), row % (PATH + MASKS)
    result += sequence * (FACTS + NODES)
    count = tl.load(result)
    place = tl.minimum(index, count - 1)
    node = tl.load(path + sequence * PATH + place)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = (sequence * NODES + node).to(tl.int64) * WIDTH + element
    taken = tl.load(features + source, mask=element < WIDTH)
    if MASKS:
        taken = tl.where(index < count, taken, tl.load(mask_feature + element, mask=element < WIDTH))
    tl.store(gathered + row.to(tl.int64) * WIDTH + element, taken, mask=element < WIDTH)
    if tl.program_id(1) == 0:
        slot = tl.load(slots + sequence)
        live = slot != padding
        start = tl.load(length + slot) - tl.where(live, count, 0) + behind
        token = tl.load(result + FACTS + place)
        if MASKS:
            token = tl.where(index < count, token, mask_token)
            drafts = tl.load(speculative + slot)  # of which the newest certain row gives the first
            place = tl.minimum(index, count - 1 + tl.minimum(tl.maximum(drafts - 1, 0), MASKS))
        kv_row = physical_rows(pages, slot, start + index, live & (index == place), max_pages, PAGE_SIZE)
        store_rows(out, row, token, start + place, kv_row, True)
        if index == 0:
            tl.store(out[3] + sequence, start)
            tl.store(last_row + sequence, row + count - 1)


def leave(batch: RoundBatch, verdicts: RoundVerdicts, tapped: Tensor, ring: Tensor) -> None:
    """The certain rows of each round wait: `tapped` [B * W, width], one per node, is copied to the `ring`
    [slots, rows, width], of position p to row p mod rows, and the tables say since which row some wait.
    """
    tables, path = batch.tables, verdicts.path
    _, rows, width = ring.shape
    blocks = max(cdiv(width, FEATURE_BLOCK), 1)  # a token may be all of a feature
    _leave[(batch.size * path.shape[1], blocks)](
        batch.slots,
        tables.length,
        tables.waits,
        verdicts.result,
        path,
        tapped,
        ring,
        tables.padding_slot,
        FACTS=FACTS,
        NODES=verdicts.width,
        PATH=path.shape[1],
        ROWS=rows,
        WIDTH=width,
        BLOCK=FEATURE_BLOCK,
        PDL=batch.pdl,
        num_warps=4,
        launch_pdl=batch.pdl,
    )


@kernel(do_not_specialize=PLAIN)
def _leave(
    slots,
    length,
    waits,
    result,
    path,
    tapped,
    ring,
    padding,
    FACTS: tl.constexpr,
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    sequence, index = tl.program_id(0) // PATH, tl.program_id(0) % PATH
    slot = tl.load(slots + sequence)
    count = tl.load(result + sequence * (FACTS + NODES))
    if (slot != padding) & (index < count):
        start = tl.load(length + slot) - count
        node = tl.load(path + sequence * PATH + index)
        element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        source = (sequence * NODES + node).to(tl.int64) * WIDTH + element
        target = (slot.to(tl.int64) * ROWS + (start + index) % ROWS) * WIDTH + element
        tl.store(ring + target, tl.load(tapped + source, mask=element < WIDTH), mask=element < WIDTH)
        if (index == 0) & (tl.program_id(1) == 0):
            if tl.load(waits + slot) < 0:
                tl.store(waits + slot, start)
