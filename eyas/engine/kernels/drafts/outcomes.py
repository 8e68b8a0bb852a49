"""Drafting ahead of verdicts: the tokens and rows of each round's possible outcomes.

An outcome is a number of accepted drafts and the token after them. One program per outcome: which it is, and
where the rows of the drafts below it stand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.engine.batch.tables import mask_words
from eyas.engine.kernels.drafts.rounds import PLAIN, RoundBatch, RoundRows, physical_rows, store_rows
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import power_of_2
from eyas.engine.kernels.sampling.ranking import LOWEST_KEY
from eyas.engine.kernels.sampling.sample import find_peaks, token_of

_ANY = (*PLAIN, "slots", "peaks", "ids", "token_map", "accepted", "ranks", "drafts", "tokens", "sources")


@dataclass(frozen=True)
class RoundOutcomes:
    """K outcomes of each of B rounds whose chains have up to `steps` drafts.

    `accepted`, `ranks` int32 [B, K]: drafts that are accepted, and which of the tokens after them follows, 0
    the best that is not the next draft (-1: there is no such outcome). `drafts` int32 [B, steps]: the chain
    (-1: none). Made here: `tokens` int32 [B, K, steps + 1], the one that follows (-1: the head knows no
    other) and the drafts below it; `visible` int64 [words, B, K], the rows behind the certain ones that the
    newest row of each sees as bits, its own included.

    Row l of outcome k is logical row length + steps + l * K + k; the chain's rows are those before.
    """

    accepted: Tensor
    ranks: Tensor
    drafts: Tensor
    tokens: Tensor
    visible: Tensor

    @classmethod
    def of(cls, accepted: Tensor, ranks: Tensor, drafts: Tensor) -> RoundOutcomes:
        """With memory for what is made of them."""
        (batch, count), steps = accepted.shape, drafts.shape[1]
        words = mask_words(steps + steps * count)
        visible = torch.zeros(words, batch, count, dtype=torch.int64, device=drafts.device)
        return cls(accepted, ranks, drafts, accepted.new_empty(batch, count, steps + 1), visible)

    @property
    def sizes(self) -> dict[str, int]:
        """As kernels take them."""
        (words, _, count), steps = self.visible.shape, self.drafts.shape[1]
        nodes = power_of_2(steps + steps * count)
        return {"OUTCOMES": count, "STEPS": steps, "WORDS": words, "NODES": nodes}


def find(
    batch: RoundBatch,
    outcomes: RoundOutcomes,
    ids: Tensor,
    token_map: Tensor | None,
    rows: RoundRows,
    sources: Tensor,
) -> None:
    """The token that follows in each outcome, and the row that the draft head runs for it.

    `ids` int64 [B * (steps + 1), C]: the draft head's best after each number of accepted drafts, best first.
    `token_map` int32 or int64 [draft vocab]: the target's id of each (None: the same). `sources` int32
    [B * K] becomes the row of `ids` that each outcome's token is of.
    """
    tables, choices = batch.tables, ids.shape[1]
    _find[(outcomes.accepted.numel(),)](
        *(batch.slots, tables.length, tables.pages, ids, token_map),
        *(outcomes.accepted, outcomes.ranks, outcomes.drafts, outcomes.tokens, outcomes.visible),
        *(rows.tensors, sources, tables.padding_slot, tables.pages.shape[1]),
        **outcomes.sizes,
        CHOICES=choices,
        BLOCK=power_of_2(choices),
        PAGE_SIZE=batch.page_size,
        PDL=batch.pdl,
        num_warps=1,
        launch_pdl=batch.pdl,
    )


@kernel(do_not_specialize=_ANY)
def _find(
    slots,
    length,
    pages,
    ids,
    token_map,
    accepted,
    ranks,
    drafts,
    tokens,
    visible,
    out,
    sources,
    padding,
    max_pages,
    OUTCOMES: tl.constexpr,
    STEPS: tl.constexpr,
    WORDS: tl.constexpr,
    NODES: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0)
    sequence = row // OUTCOMES
    after, rank = tl.load(accepted + row), tl.load(ranks + row)
    source = sequence * (STEPS + 1) + after
    choice = tl.arange(0, BLOCK)
    inside = choice < CHOICES
    token = tl.load(ids + source.to(tl.int64) * CHOICES + choice, mask=inside, other=0)
    if token_map is not None:
        token = tl.load(token_map + token, mask=inside, other=0)
    token = token.to(tl.int32)
    draft = tl.load(drafts + sequence * STEPS + after, mask=after < STEPS, other=-1)
    passed = tl.sum((inside & (token == draft) & (choice <= rank)).to(tl.int32))
    place = rank + passed  # the draft itself is no end of its chain
    found = (rank >= 0) & (place < CHOICES)
    token = tl.sum(tl.where(choice == place, token, 0))
    tl.store(tokens + row * (STEPS + 1), tl.where(found, token, -1))
    tl.store(sources + row, source)
    tables = slots, length, pages, max_pages, padding
    _store(tables, visible, out, row, after, 0, token, OUTCOMES, STEPS, WORDS, NODES, PAGE_SIZE)


def extend(
    batch: RoundBatch,
    outcomes: RoundOutcomes,
    level: int,
    logits: Tensor,
    token_map: Tensor | None,
    rows: RoundRows,
) -> None:
    """Draft number `level` below the token that follows, of each outcome: its best id, and its row.

    `logits` float32 [B * K, draft vocab], coupled already. Ties go to the lowest id. The last draft needs no
    row, and gets one that is as good as any other.
    """
    tables, peaks = batch.tables, find_peaks(logits, batch.pdl)
    _extend[(outcomes.accepted.numel(),)](
        *(batch.slots, tables.length, tables.pages, peaks.keys, token_map),
        *(outcomes.accepted, outcomes.tokens, outcomes.visible),
        *(rows.tensors, level + 1, tables.padding_slot, tables.pages.shape[1]),
        **outcomes.sizes,
        **peaks.sizes,
        VOCAB=logits.shape[1],
        PAGE_SIZE=batch.page_size,
        PDL=batch.pdl,
        num_warps=1,
        launch_pdl=batch.pdl,
    )


@kernel(do_not_specialize=_ANY)
def _extend(
    slots,
    length,
    pages,
    peaks,
    token_map,
    accepted,
    tokens,
    visible,
    out,
    level,
    padding,
    max_pages,
    OUTCOMES: tl.constexpr,
    STEPS: tl.constexpr,
    WORDS: tl.constexpr,
    NODES: tl.constexpr,
    PEAKS: tl.constexpr,
    PEAKS_BLOCK: tl.constexpr,
    VOCAB: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0)
    block = tl.arange(0, PEAKS_BLOCK)
    keys = tl.load(peaks + row.to(tl.int64) * PEAKS + block, mask=block < PEAKS, other=LOWEST_KEY)
    token = token_of(tl.max(keys), VOCAB)
    if token_map is not None:
        token = tl.load(token_map + token).to(tl.int32)
    tl.store(tokens + row * (STEPS + 1) + level, token)
    if level < STEPS:
        tables = slots, length, pages, max_pages, padding
        after = tl.load(accepted + row)
        _store(tables, visible, out, row, after, level, token, OUTCOMES, STEPS, WORDS, NODES, PAGE_SIZE)


@triton.jit
def _store(
    tables,
    visible,
    out,
    row,
    after,
    level,
    token,
    OUTCOMES: tl.constexpr,
    STEPS: tl.constexpr,
    WORDS: tl.constexpr,
    NODES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Row `level` of an outcome: it sees the drafts that are accepted, and the outcome's rows up to its own.

    An outcome that does not exist has rows too, so that no stale row is read.
    """
    slots, length, pages, max_pages, padding = tables
    slot = tl.load(slots + row // OUTCOMES)
    start, own = tl.load(length + slot), row % OUTCOMES
    place = start + STEPS + level * OUTCOMES + own
    kv_row = physical_rows(pages, slot, place, slot != padding, max_pages, PAGE_SIZE)
    store_rows(out, row, token, start + after + level, kv_row, True)
    node = tl.arange(0, NODES)
    below = node - STEPS
    sees = (node < after) | ((below >= 0) & (below % OUTCOMES == own) & (below // OUTCOMES <= level))
    for word in tl.static_range(WORDS):
        here = sees & (node // 64 == word)
        bits = tl.where(here, tl.full([NODES], 1, tl.int64) << (node % 64).to(tl.int64), 0)
        tl.store(visible + word * tl.num_programs(0) + row, tl.sum(bits))
