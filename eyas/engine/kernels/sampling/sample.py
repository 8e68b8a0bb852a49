"""Chooses tokens on the device, without the host: the argmax over the surviving ids of log p + G.

The specification is `eyas.engine.sampling.sampler`. This file implements its temperature, noise and filters;
bias, penalties, bans and logprobs are the business of `eyas.engine.kernels.sampling.special`, drafts that of
`eyas.engine.kernels.drafts.chains`. It compares only `ranking` keys and rounds every score as the
specification does, so a row's token depends neither on other rows nor on how rows are cut into programs.

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

from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.kernels.sampling.gumbel import gumbel_from
from eyas.engine.kernels.sampling.ranking import LOWEST_KEY, id_of, key_of, marked, value_of
from eyas.engine.kernels.sampling.top_k_top_p import SHORTLIST, cut_of, score_of

BLOCK = 256  # ids per peak
FEW_ROWS = 8  # up to this many rows are cut into more programs each
UNFUSED = {"enable_fp_fusion": False}
"""Nothing is fused with the noise: each number of rows has kernels of its own, and one result."""

# Arguments of any alignment: not specialised, so that one compiled kernel serves all.
_SETTLING = ("cuts", "slots", "settled", "temperature", "top_k", "top_p", "min_p", "out")
_DRAWING = (
    *("cuts", "best", "slots", "positions", "settled", "choices"),
    *("temperature", "seed", "choice", "out", "ahead"),
)


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
    """N rows, all int32 [N]: the slot with each row's parameters, and the index of the token to sample.

    `settled`: tokens that are known already; -1, or None for all rows: to be chosen here. `choices`: the
    choice whose noise each row has (None: its slot's). `ahead`: what is added to every position.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    settled: torch.Tensor | None = None
    choices: torch.Tensor | None = None
    ahead: int = 0


@dataclass(frozen=True)
class LogitPeaks:
    """The best key of each block of BLOCK ids of rows of logits, int64 [N, parts]; and the state with which a
    drawing begins: `best` int64 [N], `tickets` int32 [N].
    """

    keys: torch.Tensor
    best: torch.Tensor
    tickets: torch.Tensor

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes as kernel parameters."""
        parts = self.keys.shape[1]
        return {"PEAKS": parts, "PEAKS_BLOCK": power_of_2(parts)}


def find_peaks(logits: torch.Tensor, pdl: bool) -> LogitPeaks:
    """`logits` float32 [N, vocab]."""
    count, vocab = logits.shape
    parts = -(-vocab // BLOCK)
    keys = torch.empty(count, parts, dtype=torch.int64, device=logits.device)
    peaks = LogitPeaks(
        keys, keys.new_empty(count), torch.empty(count, dtype=torch.int32, device=logits.device)
    )
    few = count <= FEW_ROWS
    blocks = 4 if few else 16
    _peaks[(cdiv(parts, blocks), count)](
        *(logits, logits.stride(0), peaks.keys, peaks.best, peaks.tickets),
        VOCAB=vocab,
        PEAKS=parts,
        BLOCKS=blocks,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=4 if few else 8,
        launch_pdl=pdl,
    )
    return peaks


def choose(
    logits: torch.Tensor, rows: SampledRows, tables: SamplingTables, out: torch.Tensor, pdl: bool = False
) -> None:
    """Writes the token of each row of `logits` float32 [N, vocab] to `out` int32 [N]; of a row that holds NaN
    or +infinity, `ranking.marked`: the host hears of it with the step's tokens.
    """
    count, vocab = logits.shape
    peaks = find_peaks(logits, pdl)
    tops, cuts = peaks.keys.new_empty(2, count)
    shortlist = logits.new_empty(count, SHORTLIST.value)
    common = {"VOCAB": vocab, "PDL": pdl, "launch_pdl": pdl, **UNFUSED}
    _settle[(count,)](
        *(logits, logits.stride(0), peaks.keys, tops, cuts, shortlist, rows.slots, rows.settled),
        *(tables.temperature, tables.top_k, tables.top_p, tables.min_p, out),
        **common,
        **peaks.sizes,
        num_warps=16,
    )
    few = count <= FEW_ROWS
    tile = 1024 if few else 2048
    _draw[(cdiv(vocab, tile), count)](
        *(logits, logits.stride(0), tops, cuts, peaks.best, peaks.tickets),
        *(rows.slots, rows.positions, rows.settled, rows.choices),
        *(tables.temperature, tables.seed, tables.choice, out, rows.ahead),
        **common,
        TILE=tile,
        num_warps=4 if few else 8,
    )


@triton.jit
def _after_previous(PDL: tl.constexpr):
    """Lets the next kernel start, and waits until the memory of the previous one is written."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@kernel(do_not_specialize=["best"])
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
    values = tl.where(values == values, values, float("inf"))  # NaN of either sign stands out
    keys = tl.where(ids < VOCAB, key_of(values, ids), LOWEST_KEY)
    tl.store(peaks + row * PEAKS + block, tl.max(keys, 1), mask=block < PEAKS)
    if tl.program_id(0) == 0:
        tl.store(best + row, LOWEST_KEY)
        tl.store(tickets + row, 0)


@kernel(do_not_specialize=_SETTLING)
def _settle(
    logits,
    stride,
    peaks,
    tops,
    cuts,
    shortlist,
    slots,
    settled,
    temperature,
    top_k,
    top_p,
    min_p,
    out,
    VOCAB: tl.constexpr,
    PEAKS: tl.constexpr,
    PEAKS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of a settled, greedy or broken row; for other rows the lowest key that survives. Of all, the
    best key.
    """
    _after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    t = tl.load(temperature + slot)
    known = _known(settled, row)
    block = tl.arange(0, PEAKS_BLOCK)
    keys = tl.load(peaks + row * PEAKS + block, mask=block < PEAKS, other=LOWEST_KEY)
    best = tl.max(keys)
    tl.store(tops + row, best)
    if _is_broken(best):
        tl.store(out + row, marked(tl.where(known >= 0, known, token_of(best, VOCAB))))
    elif known >= 0:
        tl.store(out + row, known)
    elif t == 0.0:
        tl.store(out + row, token_of(best, VOCAB))
    else:
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


@kernel(do_not_specialize=_DRAWING)
def _draw(
    logits,
    stride,
    tops,
    cuts,
    best,
    tickets,
    slots,
    positions,
    settled,
    choices,
    temperature,
    seed,
    choice,
    out,
    ahead,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best id of a tile after noise; the last tile of a row writes the row's token.

    Skips settled, greedy and broken rows.
    """
    _after_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    t = tl.load(temperature + slot)
    top = tl.load(tops + row)
    if (t != 0.0) & (_known(settled, row) < 0) & (_is_broken(top) == 0):
        start = tl.program_id(0) * TILE
        ids = start + tl.arange(0, TILE)
        values = tl.load(logits + row * stride + ids, mask=ids < VOCAB, other=-float("inf"))
        scores = score_of(values, value_of(top), t)
        alive = (ids < VOCAB) & (key_of(scores, ids) >= tl.load(cuts + row))
        if tl.max(alive.to(tl.int32)) > 0:  # most tiles have no survivor
            if choices is None:
                own = tl.load(choice + slot)
            else:
                own = tl.load(choices + row)
            stream = tl.load(seed + slot), tl.load(positions + row) + ahead, own
            noise = gumbel_from(*stream, start, TILE)
            keys = tl.where(alive, key_of(scores + noise, ids), LOWEST_KEY)
            tl.atomic_max(best + row, tl.max(keys))
        if tl.atomic_add(tickets + row, 1) == tl.num_programs(0) - 1:
            key = tl.atomic_max(best + row, LOWEST_KEY)  # an atomic read: it sees what other tiles wrote
            tl.store(out + row, token_of(key, VOCAB))


@triton.jit
def _is_broken(best):
    """True if the best of a row's keys is that of NaN or +infinity."""
    return value_of(best) == float("inf")


@triton.jit
def _known(settled, row):
    """The row's token if it is settled, or -1."""
    known = tl.full([], -1, tl.int32)
    if settled is not None:
        known = tl.load(settled + row)
    return known


@triton.jit
def token_of(key, VOCAB: tl.constexpr):
    """The id of a key. A row of NaN still gives an id of the vocabulary."""
    return tl.minimum(id_of(key), VOCAB - 1)
