"""Chooses tokens on the device, without the host: the argmax over the surviving ids of log p + G.

The specification is `eyas.engine.sampling.sampler`. This file implements its temperature, noise and filters;
it does not know bias, penalties, bans and logprobs. It compares only `ranking` keys and rounds every score as
the specification does, so a row's token depends neither on other rows nor on how rows are cut into programs.

Three kernels: `_peaks` finds the best logit of each block of ids. `_settle`, one program per row, finds the
best of these, which is the token of a greedy row; for other rows it finds which ids survive the filters.
`_draw` adds the noise to the survivors. Memory comes from torch and nothing waits for the host, so all of it
can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.gumbel import gumbel_at, gumbel_from
from eyas.engine.kernels.ranking import LOWEST_KEY, id_of, key_of, value_of
from eyas.engine.kernels.survivors import SHORTLIST, cut_of, score_of

_BLOCK = 256  # ids per peak
_FEW_ROWS = 8  # up to this many rows are cut into more programs each
# Arguments of any alignment: not specialised, so that one compiled kernel serves all.
_SETTLING = ("cuts", "slots", "temperature", "top_k", "top_p", "min_p", "out", "token_map")
_DRAWING = ("cuts", "best", "slots", "positions", "temperature", "seed", "choice", "out", "token_map")


class SamplingTables(Protocol):
    """Sampling parameters per slot, all [S], with the values of `eyas.common.params.SamplingParams`.

    temperature, top_p and min_p float32; top_k (0: off) and choice int32; seed int64 with unsigned bits.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor
    choice: torch.Tensor


@dataclass(frozen=True)
class SampledRows:
    """N rows, both int32 [N]: the slot with each row's parameters, and the index of the token to sample."""

    slots: torch.Tensor
    positions: torch.Tensor


def choose(
    logits: torch.Tensor, rows: SampledRows, tables: SamplingTables, out: torch.Tensor, pdl: bool = False
) -> None:
    """Writes the token of each row of `logits` float32 [N, vocab] to `out` int32 [N]."""
    _run(_Job(logits, rows, tables, None, filtered=True, pdl=pdl), out)


def propose(
    logits: torch.Tensor,
    rows: SampledRows,
    tables: SamplingTables,
    out: torch.Tensor,
    token_map: torch.Tensor | None,
    pdl: bool = False,
) -> None:
    """Writes the target's id of each row's best draft to `out` int32 [N]: with noise, without filters.

    `logits` float32 [N, draft vocab]. `token_map` int32 or int64 [draft vocab]: the target's id of each draft
    id (None: the same). The result is the argmax of `sampler.perturbed`; ties go to the lowest draft id.
    """
    _run(_Job(logits, rows, tables, token_map, filtered=False, pdl=pdl), out)


@dataclass(frozen=True)
class _Job:
    """One call of `choose` or `propose`."""

    logits: torch.Tensor
    rows: SampledRows
    tables: SamplingTables
    token_map: torch.Tensor | None
    filtered: bool
    pdl: bool

    @property
    def peaks(self) -> int:
        """Peaks per row."""
        return -(-self.logits.shape[1] // _BLOCK)

    @property
    def common(self) -> dict[str, object]:
        return {"VOCAB": self.logits.shape[1], "PDL": self.pdl, "launch_pdl": self.pdl}


def _run(job: _Job, out: torch.Tensor) -> None:
    logits, slots, tables, count = job.logits, job.rows.slots, job.tables, job.logits.shape[0]
    peaks = torch.empty(count, job.peaks, dtype=torch.int64, device=logits.device)
    tops, cuts, best = peaks.new_empty(3, count)
    tickets = torch.empty(count, dtype=torch.int32, device=logits.device)
    shortlist = logits.new_empty(count, SHORTLIST.value if job.filtered else 0)
    few = count <= _FEW_ROWS
    blocks = 4 if few else 16
    _peaks[(triton.cdiv(job.peaks, blocks), count)](
        *(logits, logits.stride(0), peaks, best, tickets),
        **job.common,
        PEAKS=job.peaks,
        BLOCKS=blocks,
        BLOCK=_BLOCK,
        num_warps=4 if few else 8,
    )
    filters = (tables.temperature, tables.top_k, tables.top_p, tables.min_p)
    _settle[(count,)](
        *(logits, logits.stride(0), peaks, tops, cuts, shortlist, slots, *filters, out, job.token_map),
        **job.common,
        PEAKS=job.peaks,
        PEAKS_BLOCK=triton.next_power_of_2(job.peaks),
        FILTERED=job.filtered,
        num_warps=16 if job.filtered else 4,
    )
    tile = 1024 if few else 2048
    noise = (tables.temperature, tables.seed, tables.choice)
    _draw[(triton.cdiv(logits.shape[1], tile), count)](
        *(logits, logits.stride(0), tops, cuts, best, tickets),
        *(slots, job.rows.positions, *noise, out, job.token_map),
        **job.common,
        TILE=tile,
        FILTERED=job.filtered,
        num_warps=4 if few else 8,
    )


@triton.jit
def _after_previous(PDL: tl.constexpr):
    """Lets the next kernel start, and waits until the memory of the previous one is written."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["best"])
def _peaks(
    logits,
    stride,
    peaks,
    best,
    tickets,
    VOCAB: tl.constexpr,
    PEAKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best key of each block of logits. Also resets the row's best key and ticket for `_draw`."""
    _after_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(logits + row * stride + ids, mask=ids < VOCAB, other=0.0)
    keys = tl.where(ids < VOCAB, key_of(values, ids), LOWEST_KEY)
    tl.store(peaks + row * PEAKS + block, tl.max(keys, 1), mask=block < PEAKS)
    if tl.program_id(0) == 0:
        tl.store(best + row, LOWEST_KEY)
        tl.store(tickets + row, 0)


@triton.jit(do_not_specialize=_SETTLING)
def _settle(
    logits,
    stride,
    peaks,
    tops,
    cuts,
    shortlist,
    slots,
    temperature,
    top_k,
    top_p,
    min_p,
    out,
    token_map,
    VOCAB: tl.constexpr,
    PEAKS: tl.constexpr,
    PEAKS_BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of a greedy row; for other rows the best key, and the lowest key that survives."""
    _after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    t = tl.load(temperature + slot)
    block = tl.arange(0, PEAKS_BLOCK)
    keys = tl.load(peaks + row * PEAKS + block, mask=block < PEAKS, other=LOWEST_KEY)
    best = tl.max(keys)
    if t == 0.0:
        tl.store(out + row, _token(best, token_map, VOCAB))
    else:
        tl.store(tops + row, best)
        if FILTERED:
            k, p, least = tl.load(top_k + slot), tl.load(top_p + slot), tl.load(min_p + slot)
            values = tl.where(block < PEAKS, value_of(keys), -float("inf"))
            cut = cut_of(
                logits + row * stride,
                shortlist + row * SHORTLIST,
                values,
                value_of(best),
                t,
                k,
                p,
                least,
                VOCAB,
                PEAKS,
            )
            tl.store(cuts + row, cut)


@triton.jit(do_not_specialize=_DRAWING)
def _draw(
    logits,
    stride,
    tops,
    cuts,
    best,
    tickets,
    slots,
    positions,
    temperature,
    seed,
    choice,
    out,
    token_map,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    FILTERED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best id of a tile after noise; the last tile of a row writes the row's token. Skips greedy rows."""
    _after_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    t = tl.load(temperature + slot)
    if t != 0.0:
        start = tl.program_id(0) * TILE
        ids = start + tl.arange(0, TILE)
        values = tl.load(logits + row * stride + ids, mask=ids < VOCAB, other=-float("inf"))
        scores = score_of(values, value_of(tl.load(tops + row)), t)
        alive = ids < VOCAB
        if FILTERED:
            alive = alive & (key_of(scores, ids) >= tl.load(cuts + row))
        if tl.max(alive.to(tl.int32)) > 0:  # with filters, most tiles have no survivor
            stream = tl.load(seed + slot), tl.load(positions + row), tl.load(choice + slot)
            if token_map is None:
                noise = gumbel_from(*stream, start, TILE)
            else:
                targets = tl.load(token_map + ids, mask=ids < VOCAB, other=0).to(tl.int32)
                noise = gumbel_at(*stream, targets)
            keys = tl.where(alive, key_of(scores + noise, ids), LOWEST_KEY)
            tl.atomic_max(best + row, tl.max(keys))
        if tl.atomic_add(tickets + row, 1) == tl.num_programs(0) - 1:
            found = tl.atomic_max(best + row, LOWEST_KEY)  # an atomic read: it sees what other tiles wrote
            tl.store(out + row, _token(found, token_map, VOCAB))


@triton.jit
def _token(key, token_map, VOCAB: tl.constexpr):
    """The target's id of a key. A row of NaN still gives an id of the vocabulary."""
    token = tl.minimum(id_of(key), VOCAB - 1)
    if token_map is not None:
        token = tl.load(token_map + token).to(tl.int32)
    return token
