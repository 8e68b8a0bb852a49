"""How a round of chains was launched before `eyas.engine.kernels.drafts.chains`, for comparison alone.

A draft took four kernels: peaks, the token of greedy rows, the noise of the others, then tables and rows; and
torch added positions, copied taps and picked rows. It serves `time_chain`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from eyas.engine.batch.rows import DecodeRows
from eyas.engine.kernels.drafts.rounds import PLAIN, RoundBatch, RoundRows, physical_rows, store_rows
from eyas.engine.kernels.launch.launching import after_previous
from eyas.engine.kernels.sampling.gumbel import gumbel_at, gumbel_from
from eyas.engine.kernels.sampling.ranking import LOWEST_KEY, key_of, value_of
from eyas.engine.kernels.sampling.sample import FEW_ROWS, UNFUSED, find_peaks, token_of
from eyas.engine.kernels.sampling.survivors import score_of
from eyas.engine.models.base import Drafted
from eyas.engine.models.ops.device import DeviceOps
from eyas.engine.speculation.device import DeviceProposer

LANES = 128
ANY = (*PLAIN, "best", "slots", "temperature", "choice", "token_map", "positions")


def chain(self: DeviceProposer, last: Drafted, batch: RoundBatch, steps: int) -> None:
    """In place of `DeviceProposer._chain`."""
    rows = RoundRows(*(batch.slots.new_empty(batch.size) for _ in range(4)))
    places = self._tables.length.index_select(0, batch.slots)
    for step in range(steps):
        best = batch.slots.new_empty(batch.size)
        propose(batch, self._head.logits(last.rows), places + (1 + step), self._head.token_map, best)
        propose_rows(batch, best, step, rows)
        if step + 1 < steps:
            last = self.run(last.features, rows, DecodeRows(batch.slots, rows.starts))


def put(self: DeviceOps[Any, Any], x: torch.Tensor, room: torch.Tensor, place: int) -> None:
    """In place of `DeviceOps.put`."""
    room[:, place].copy_(x)


def picked(self: DeviceProposer, drafted: Drafted, index: torch.Tensor) -> Drafted:
    """In place of `DeviceProposer.picked`, of a head whose rows are features too."""
    rows = drafted.rows.index_select(0, index)
    return Drafted(rows, rows)


def propose(
    batch: RoundBatch,
    logits: torch.Tensor,
    positions: torch.Tensor,
    token_map: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """The target's id of each row's best draft."""
    tables, (count, vocab), few = batch.tables, logits.shape, logits.shape[0] <= FEW_ROWS
    peaks, tops = find_peaks(logits, batch.pdl), torch.empty(count, dtype=torch.int64, device=logits.device)
    common = {"VOCAB": vocab, "PDL": batch.pdl, "launch_pdl": batch.pdl, **UNFUSED}
    _settle[(count,)](
        *(peaks.keys, tops, batch.slots, tables.temperature, out, token_map),
        **common,
        **peaks.sizes,
        num_warps=4,
    )
    tile = 1024 if few else 2048
    _draw[(triton.cdiv(vocab, tile), count)](
        *(logits, logits.stride(0), tops, peaks.best, peaks.tickets, batch.slots, positions),
        *(tables.temperature, tables.seed, tables.choice, out, token_map),
        **common,
        TILE=tile,
        num_warps=4 if few else 8,
    )


@triton.jit(do_not_specialize=ANY)
def _settle(
    peaks, tops, slots, temperature, out, token_map,
    VOCAB: tl.constexpr, PEAKS: tl.constexpr, PEAKS_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PEAKS_BLOCK)
    best = tl.max(tl.load(peaks + row * PEAKS + block, mask=block < PEAKS, other=LOWEST_KEY))
    if tl.load(temperature + tl.load(slots + row)) == 0.0:
        tl.store(out + row, _token(best, token_map, VOCAB))
    else:
        tl.store(tops + row, best)


@triton.jit(do_not_specialize=ANY)
def _draw(
    logits, stride, tops, best, tickets, slots, positions, temperature, seed, choice, out, token_map,
    VOCAB: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    t = tl.load(temperature + slot)
    if t != 0.0:
        start = tl.program_id(0) * TILE
        ids = start + tl.arange(0, TILE)
        values = tl.load(logits + row * stride + ids, mask=ids < VOCAB, other=-float("inf"))
        scores = score_of(values, value_of(tl.load(tops + row)), t)
        stream = tl.load(seed + slot), tl.load(positions + row), tl.load(choice + slot)
        if token_map is None:
            noise = gumbel_from(*stream, start, TILE)
        else:
            targets = tl.load(token_map + ids, mask=ids < VOCAB, other=0).to(tl.int32)
            noise = gumbel_at(*stream, targets)
        keys = tl.where(ids < VOCAB, key_of(scores + noise, ids), LOWEST_KEY)
        tl.atomic_max(best + row, tl.max(keys))
        if tl.atomic_add(tickets + row, 1) == tl.num_programs(0) - 1:
            tl.store(out + row, _token(tl.atomic_max(best + row, LOWEST_KEY), token_map, VOCAB))


@triton.jit
def _token(key, token_map, VOCAB: tl.constexpr):
    token = token_of(key, VOCAB)
    if token_map is not None:
        token = tl.load(token_map + token).to(tl.int32)
    return token


def propose_rows(batch: RoundBatch, best: torch.Tensor, step: int, rows: RoundRows) -> None:
    """Stores draft number `step` of each sequence, and writes the row that the draft head runs next.

    `best` int32 [B]: target ids. A sequence whose drafts end above gets -1 and an empty row. The row and
    its position lie `step` after the root's, since draft row i is (feature i, token i + 1).
    """
    tables = batch.tables
    _propose_rows[(triton.cdiv(batch.size, LANES),)](
        batch.slots,
        best,
        tables.length,
        tables.drafts,
        tables.speculative,
        tables.pages,
        rows.tensors,
        batch.size,
        step,
        tables.padding_slot,
        tables.pages.shape[1],
        tables.drafts.shape[1],
        PAGE_SIZE=batch.page_size,
        BLOCK=LANES,
        PDL=batch.pdl,
        num_warps=LANES // 32,
        launch_pdl=batch.pdl,
    )


@triton.jit(do_not_specialize=ANY)
def _propose_rows(
    slots,
    best,
    length,
    drafts,
    speculative,
    pages,
    out,
    rows,
    step,
    padding,
    max_pages,
    drafts_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(slots + row, mask=inside, other=padding)
    live = inside & (slot != padding)
    token = tl.load(best + row, mask=inside, other=0)
    wanted = live & (tl.load(speculative + slot) > step)
    tl.store(drafts + slot * drafts_stride + step, tl.where(wanted, token, -1), mask=live)
    start = tl.load(length + slot) + step
    kv_row = physical_rows(pages, slot, start, wanted, max_pages, PAGE_SIZE)
    store_rows(out, row, token, start, kv_row, inside)
    tl.store(out[3] + row, start, mask=inside)
