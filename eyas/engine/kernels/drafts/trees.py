"""EAGLE-2 trees grown on the device: the k best candidates of each level are expanded, the best of all kept.

One program per sequence. `speculation.expansion.TreeExpansion` is the specification, to the bit: scores are
products in float64, and of equal scores the lower flat index wins. (Li et al., EAGLE-2, sections 4.1 and
4.2.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.common.config import SpeculationConfig
from eyas.engine.batch.tables import mask_words
from eyas.engine.kernels.drafts.rounds import PLAIN, RoundBatch, RoundRows, physical_rows, store_rows
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import power_of_2

RIVALS = tl.constexpr(16)  # candidates with which all others are compared at a time


@dataclass(frozen=True)
class TreeGrowth:
    """The growing trees of B sequences, with k = topk nodes per level and C = k + (steps - 1) k^2 candidates.

    `scores` float64, `tokens`, `parents` int32 [B, C] (-1: the root): candidates in the order of their flat
    indices. Slot g of level l is the g-th best candidate of that level, and draft row l * k + g. `frontier`
    int32 [steps - 1, B, k]: its flat index. `visible` int64 [steps - 1, words, B, k]: the draft rows that it
    sees as bits, its own included, so visible[l] is the attention mask of level l.
    `selected` int32 [B, draft_tokens - 1]: flat indices of the nodes of the final tree. `token_map` int64
    [Vd]: the target's id of each draft id (None: the same).
    """

    spec: SpeculationConfig
    scores: Tensor
    tokens: Tensor
    parents: Tensor
    frontier: Tensor
    visible: Tensor
    selected: Tensor
    token_map: Tensor | None


@dataclass(frozen=True)
class TreeFrontier:
    """The rows that the draft head runs next, k per sequence, as a forward reads them.

    rows.starts is the sequence's length, and `RoundBatch.behind`; from there attention sees (level + 1) * k
    draft rows under the mask Growth.visible[level]. `sources` int32 [B * k]: each feature is that row of the
    previous forward's output.
    """

    rows: RoundRows
    sources: Tensor


def new_growth(spec: SpeculationConfig, batch: int, token_map: Tensor | None, device: str) -> TreeGrowth:
    """Memory for `batch` trees."""
    k, levels = spec.topk, spec.steps - 1
    candidates = k + levels * k * k

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return TreeGrowth(
        spec=spec,
        scores=torch.zeros(batch, candidates, dtype=torch.float64, device=device),
        tokens=ints(batch, candidates),
        parents=ints(batch, candidates),
        frontier=ints(levels, batch, k),
        visible=torch.zeros(levels, mask_words(levels * k), batch, k, dtype=torch.int64, device=device),
        selected=ints(batch, spec.draft_tokens - 1),
        token_map=token_map,
    )


def grow(
    batch: RoundBatch,
    growth: TreeGrowth,
    level: int,
    probabilities: Tensor,
    ids: Tensor,
    below: TreeFrontier | None,
) -> None:
    """Adds the children of each frontier node, best first, and chooses the next frontier.

    `probabilities` float32 and `ids` int64 come from the draft head: [B, k] at level 0, then [B * k, k].
    The next frontier is written to `below`, which is None at the last level.
    """
    tables, spec = batch.tables, growth.spec
    _grow[(batch.size,)](
        batch.slots,
        tables.length,
        tables.speculative,
        tables.pages,
        probabilities,
        ids,
        growth.token_map,
        growth.scores,
        growth.tokens,
        growth.parents,
        growth.frontier,
        growth.visible,
        below and below.rows.tensors,
        below and below.sources,
        level,
        batch.behind,
        tables.pages.shape[1],
        TOPK=spec.topk,
        WORDS=growth.visible.shape[1],
        AT_ROOT=level == 0,
        CANDIDATES=growth.scores.shape[1],
        PAGE_SIZE=batch.page_size,
        BLOCK=power_of_2(probabilities.numel() // batch.size),
        PDL=batch.pdl,
        num_warps=4,
        launch_pdl=batch.pdl,
    )


@kernel(do_not_specialize=PLAIN)
def _grow(
    slots,
    length,
    speculative,
    pages,
    probabilities,
    ids,
    token_map,
    scores,
    tokens,
    parents,
    frontier,
    visible,
    out,
    sources,
    level,
    behind,
    max_pages,
    TOPK: tl.constexpr,
    WORDS: tl.constexpr,
    AT_ROOT: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    PARENTS: tl.constexpr = 1 if AT_ROOT else TOPK
    sequence = tl.program_id(0)
    child = tl.arange(0, BLOCK)
    new = child < PARENTS * TOPK
    parent_slot = child // TOPK
    token, score = _children(probabilities, ids, token_map, sequence * PARENTS * TOPK + child, new)
    parent = tl.full([BLOCK], -1, tl.int32)
    first = 0
    if not AT_ROOT:
        first = TOPK + (level - 1) * TOPK * TOPK
        above = ((level - 1) * tl.num_programs(0) + sequence) * TOPK + parent_slot
        parent = tl.load(frontier + above, mask=new, other=0)
        score *= tl.load(scores + sequence * CANDIDATES + parent, mask=new, other=0.0)
    place = sequence * CANDIDATES + first + child
    tl.store(scores + place, score, mask=new)
    tl.store(tokens + place, token, mask=new)
    tl.store(parents + place, parent, mask=new)
    if sources is not None:
        tl.debug_barrier()  # waits until all threads have written their scores
        rank = _rank(scores + sequence * CANDIDATES + first, score, child, PARENTS * TOPK, BLOCK)
        best = new & (rank < TOPK)
        row = level * TOPK + rank
        at = (level * tl.num_programs(0) + sequence) * TOPK + rank
        tl.store(frontier + at, first + child, mask=best)
        _store_visible(visible, level, parent_slot, rank, new, best, TOPK, WORDS, AT_ROOT)
        slot = tl.load(slots + sequence)
        start = tl.load(length + slot) + behind
        expanded = best & (tl.load(speculative + slot) != 0)
        kv_row = physical_rows(pages, slot, start + row, expanded, max_pages, PAGE_SIZE)
        query = sequence * TOPK + rank
        store_rows(out, query, token, start + level, kv_row, best)
        tl.store(sources + query, sequence * PARENTS + parent_slot, mask=best)
        tl.store(out[3] + sequence, start)


@triton.jit
def _children(probabilities, ids, token_map, given, new):
    """Target ids int32, and probabilities float64 clamped to 0 .. 1: no child may score above its parent."""
    token = tl.load(ids + given, mask=new, other=0)
    if token_map is not None:
        token = tl.load(token_map + token, mask=new, other=0)
    probability = tl.load(probabilities + given, mask=new, other=0.0).to(tl.float64)
    return token.to(tl.int32), tl.where(probability > 0.0, tl.minimum(probability, 1.0), 0.0)  # NaN: 0


@triton.jit
def _store_visible(
    visible,
    level,
    parent_slot,
    rank,
    new,
    best,
    TOPK: tl.constexpr,
    WORDS: tl.constexpr,
    AT_ROOT: tl.constexpr,
):
    """A node sees what its parent sees, and its own row."""
    for word in tl.static_range(WORDS):
        seen = bit(level * TOPK + rank, word)
        if not AT_ROOT:
            above = ((level - 1) * WORDS + word) * tl.num_programs(0) + tl.program_id(0)
            seen |= tl.load(visible + above * TOPK + parent_slot, mask=new, other=0)
        here = (level * WORDS + word) * tl.num_programs(0) + tl.program_id(0)
        tl.store(visible + here * TOPK + rank, seen, mask=best)


@triton.jit
def bit(row, word):
    """The word of a mask that shows `row` alone."""
    return tl.where(row // 64 == word, tl.full(row.shape, 1, tl.int64) << (row % 64), 0)


@triton.jit
def _rank(scores, score, index, count, BLOCK: tl.constexpr):
    """How many of scores[0 .. count - 1] are higher than `score`, or equal at a lower index."""
    rank = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, count, RIVALS):
        rival = begin + tl.arange(0, RIVALS)
        theirs = tl.load(scores + rival, mask=rival < count, other=-1.0)[None, :]
        equal = (theirs == score[:, None]) & (rival[None, :] < index[:, None])
        rank += tl.sum(((theirs > score[:, None]) | equal).to(tl.int32), 1)
    return rank


def select(batch: RoundBatch, growth: TreeGrowth) -> None:
    """Makes the best draft_tokens - 1 candidates of all levels the drafts of each sequence's next round.

    They are in the order of their flat indices, so that parents come before their children. What a sequence's
    own limits leave out is no draft (-1): what is too deep, then all but the best children, then the last.
    """
    tables, spec = batch.tables, growth.spec
    candidates = growth.scores.shape[1]
    _select[(batch.size,)](
        batch.slots,
        tables.speculative,
        tables.most_topk,
        tables.most_nodes,
        growth.scores,
        growth.tokens,
        growth.parents,
        growth.selected,
        tables.drafts,
        tables.parents,
        tables.mask,
        tables.depth,
        tables.padding_slot,
        tables.drafts.shape[1],
        tables.depth.shape[1],
        WORDS=tables.mask.shape[0],
        STEPS=spec.steps,
        TOPK=spec.topk,
        CANDIDATES=candidates,
        NODES=spec.draft_tokens - 1,
        BLOCK=power_of_2(candidates),
        NODE_BLOCK=power_of_2(tables.drafts.shape[1]),
        PDL=batch.pdl,
        num_warps=8,
        launch_pdl=batch.pdl,
    )


@kernel(do_not_specialize=PLAIN)
def _select(
    slots,
    speculative,
    most_topk,
    most_nodes,
    scores,
    candidate_tokens,
    candidate_parents,
    selected,
    drafts,
    parents,
    mask,
    depth,
    padding,
    drafts_stride,
    nodes_stride,
    WORDS: tl.constexpr,
    STEPS: tl.constexpr,
    TOPK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    NODE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence)
    index = tl.arange(0, BLOCK)
    scores += sequence * CANDIDATES
    score = tl.load(scores + index, mask=index < CANDIDATES, other=-1.0)
    rank = _rank(scores, score, index, CANDIDATES, BLOCK)
    good = (rank < NODES) & (index < CANDIDATES)
    selected += sequence * NODES
    tl.store(selected + tl.cumsum(good.to(tl.int32), 0) - 1, index, mask=good)
    tl.debug_barrier()  # waits until every thread has written its choice

    node = tl.arange(0, NODE_BLOCK)
    real = (node < NODES) & (node < CANDIDATES)
    all_selected = tl.load(selected + node, mask=real, other=CANDIDATES)
    token = tl.load(candidate_tokens + sequence * CANDIDATES + all_selected, mask=real, other=-1)
    up = tl.load(candidate_parents + sequence * CANDIDATES + all_selected, mask=real, other=-1)
    parent = tl.where(up >= 0, _place(up, all_selected), -1)
    there = (slot != padding) & (node < drafts_stride)
    topk = _limit(most_topk + slot, TOPK)
    for word in tl.static_range(WORDS):
        seen = bit(node * 0, word) | bit(node + 1, word)
        above, below, thin = up, tl.where(real, 1, 0), all_selected % TOPK < topk  # its place among siblings
        for _ in range(STEPS - 1):
            seen |= tl.where(above >= 0, bit(_place(above, all_selected) + 1, word), 0)
            below += tl.where(above >= 0, 1, 0)
            thin = thin & ((above < 0) | (above % TOPK < topk))
            above = tl.load(candidate_parents + sequence * CANDIDATES + above, mask=above >= 0, other=-1)
        entry = (word * (padding + 1) + slot) * nodes_stride + node + 1
        tl.store(mask + entry, seen, mask=there)
    own = real & thin & (below <= tl.load(speculative + slot))
    token = tl.where(own & (tl.cumsum(own.to(tl.int32), 0) <= _limit(most_nodes + slot, NODES)), token, -1)
    tl.store(drafts + slot * drafts_stride + node, token, mask=there)
    tl.store(parents + slot * drafts_stride + node, parent, mask=there)
    tl.store(depth + slot * nodes_stride + node + 1, below, mask=there)


@triton.jit
def _limit(own, most):
    """A sequence's own limit, or the engine's where that is 0."""
    limit = tl.load(own)
    return tl.where(limit > 0, limit, most)


@triton.jit
def _place(candidate, all_selected):
    """The node that a kept candidate became: the number of kept candidates before it."""
    return tl.sum((all_selected[None, :] < candidate[:, None]).to(tl.int32), 1)
