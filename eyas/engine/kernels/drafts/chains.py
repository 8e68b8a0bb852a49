"""The next draft of a chain, from the draft head's logits: its token, and the row that the head runs next.

The specifications are `eyas.engine.sampling.sampler.perturbed` (the token: the target's noise, no filters)
and `eyas.engine.speculation.draft_worker.draft_runner` (the row). Two kernels: the peaks of
`eyas.engine.kernels.sampling.sample`, then tiles of ids, of which a row's last one writes its draft.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.drafts.rounds import PLAIN, RoundBatch, RoundRows, physical_rows, store_rows
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.kernels.sampling.gumbel import gumbel_at, gumbel_from
from eyas.engine.kernels.sampling.ranking import LOWEST_KEY, key_of, value_of
from eyas.engine.kernels.sampling.sample import FEW_ROWS, UNFUSED, find_peaks, token_of
from eyas.engine.kernels.sampling.top_k_top_p import score_of

# Arguments of any alignment: not specialised, so that one compiled kernel serves all.
_ANY = (*PLAIN, "best", "slots", "temperature", "choice", "token_map")


def propose(
    batch: RoundBatch,
    logits: torch.Tensor,
    step: int,
    token_map: torch.Tensor | None,
    rows: RoundRows,
) -> None:
    """Stores draft number `step` of each of B sequences, and writes the row that the draft head runs next.

    `logits` float32 [B, draft vocab]. `token_map` int32 or int64 [draft vocab]: the target's id of each draft
    id (None: the same). A greedy sequence's draft is the best id, another's the argmax of
    `sampler.perturbed`; ties go to the lowest draft id. A sequence whose drafts end above gets -1 and an
    empty row. The row and its position lie `step` after the root's, since draft row i is (feature i, token
    i + 1), or `batch.behind` further; the noise is that of the token after the root and its `step` drafts.
    """
    _choose(batch, logits, step, token_map, rows, 1)


def propose_all(batch: RoundBatch, logits: torch.Tensor, token_map: torch.Tensor | None) -> None:
    """Stores all drafts of each of B sequences: `logits` float32 [B * drafts, draft vocab], one sequence's
    after the other's. They are those that `propose` would store one after the other.
    """
    _choose(batch, logits, 0, token_map, None, logits.shape[0] // max(batch.size, 1))


def _choose(
    batch: RoundBatch,
    logits: torch.Tensor,
    step: int,
    token_map: torch.Tensor | None,
    rows: RoundRows | None,
    each: int,
) -> None:
    tables, (count, vocab) = batch.tables, logits.shape
    peaks, few = find_peaks(logits, batch.pdl), count <= FEW_ROWS
    tile = 1024 if few else 2048
    _propose[(cdiv(vocab, tile), count)](
        *(logits, logits.stride(0), peaks.keys, peaks.best, peaks.tickets, token_map),
        *(batch.slots, tables.length, tables.temperature, tables.seed, tables.choice),
        *(tables.drafts, tables.speculative, tables.pages, None if rows is None else rows.tensors),
        *(step, batch.behind, tables.padding_slot, tables.pages.shape[1], tables.drafts.shape[1]),
        VOCAB=vocab,
        **peaks.sizes,
        EACH=each,
        TILE=tile,
        PAGE_SIZE=batch.page_size,
        PDL=batch.pdl,
        num_warps=4 if few else 8,
        launch_pdl=batch.pdl,
        **UNFUSED,
    )


@kernel(do_not_specialize=_ANY)
def _propose(
    logits,
    stride,
    peaks,
    best,
    tickets,
    token_map,
    slots,
    length,
    temperature,
    seed,
    choice,
    drafts,
    speculative,
    pages,
    out,
    step,
    behind,
    padding,
    max_pages,
    drafts_stride,
    VOCAB: tl.constexpr,
    PEAKS: tl.constexpr,
    PEAKS_BLOCK: tl.constexpr,
    EACH: tl.constexpr,
    TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of one row, of EACH per sequence. Of a greedy row the first tile alone has anything to do."""
    after_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row // EACH)
    step += (row % EACH).to(tl.int32)
    t = tl.load(temperature + slot)
    start = tl.load(length + slot) + step
    block = tl.arange(0, PEAKS_BLOCK)
    top = tl.max(tl.load(peaks + row * PEAKS + block, mask=block < PEAKS, other=LOWEST_KEY))
    highest, writes = top, tl.program_id(0) == 0
    if t != 0.0:
        first = tl.program_id(0) * TILE
        ids = first + tl.arange(0, TILE)
        values = tl.load(logits + row * stride + ids, mask=ids < VOCAB, other=-float("inf"))
        stream = tl.load(seed + slot), start + 1, tl.load(choice + slot)
        noise = _noise(stream, first, ids, token_map, VOCAB, TILE)
        keys = key_of(score_of(values, value_of(top), t) + noise, ids)
        tl.atomic_max(best + row, tl.max(tl.where(ids < VOCAB, keys, LOWEST_KEY)))
        writes = tl.atomic_add(tickets + row, 1) == tl.num_programs(0) - 1
        if writes:
            highest = tl.atomic_max(best + row, LOWEST_KEY)  # an atomic read: it sees what other tiles wrote
    if writes:
        token = token_of(highest, VOCAB)
        if token_map is not None:
            token = tl.load(token_map + token).to(tl.int32)
        drafted = (slot != padding) & (tl.load(speculative + slot) > step)
        tl.store(drafts + slot * drafts_stride + step, tl.where(drafted, token, -1), mask=slot != padding)
        if out is not None:
            kv_row = physical_rows(pages, slot, start + behind, drafted, max_pages, PAGE_SIZE)
            store_rows(out, row, token, start + behind, kv_row, True)
            tl.store(out[3] + row, start + behind)


@triton.jit
def _noise(stream, first, ids, token_map, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """The target's, for draft ids from `first` on."""
    if token_map is None:
        noise = gumbel_from(stream[0], stream[1], stream[2], first, TILE)
    else:
        targets = tl.load(token_map + ids, mask=ids < VOCAB, other=0).to(tl.int32)
        noise = gumbel_at(stream[0], stream[1], stream[2], targets)
    return noise
