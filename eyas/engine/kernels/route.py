"""Which experts each row takes, and in which order a grouped product walks the rows of all experts.

`choose` is `eyas.engine.layers.experts.Router` after its product, in float32: scores, groups, the best, of
equals the first, and their weights. `group` then sorts the choices by expert, on the device and by launches
of fixed shapes, and cuts each expert's choices into blocks of rows. A choice is row * per_row + rank. No sum
is taken by an atomic, and the order is one: by expert, then by choice. This file knows numbers of experts and
rows; it refuses to know what an expert computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.kernels.grouped_tiles import most_blocks
from eyas.engine.kernels.launching import after_previous

TINY = tl.constexpr(1e-20)
MOST = tl.constexpr(1e30)  # of a logit, either way: differences stay numbers
_CHUNK, _LEAST = 256, 32  # choices that one program of `group` puts in their places, at most and at least
_COLUMN = 64  # of those, how many are compared at a time
_PAIRS = 4096  # of a choice and an expert, that a warp holds


@dataclass(frozen=True)
class Chosen:
    """The experts of m rows, best first, and their weights: int32 and float32 [m, per_row, or one more]."""

    experts: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Grouped:
    """Choices in the order of their experts, int32 [choices], cut into blocks of at most `rows` choices.

    `blocks` int32 [3 * most + 1]: of each block its expert, then its first place in the order, then the place
    behind its last; and how many blocks there are. `most` follows from sizes alone.
    """

    order: torch.Tensor
    blocks: torch.Tensor
    rows: int

    @property
    def most(self) -> int:
        """As many blocks as there may be."""
        return (self.blocks.shape[0] - 1) // 3


def choose(
    logits: torch.Tensor,
    spec: ExpertsSpec,
    correction: torch.Tensor | None = None,
    *,
    shared: bool = False,
    uniform: bool = False,
    pdl: bool = False,
) -> Chosen:
    """logits float32 [m, at least experts] -> what their rows take. `correction`: float32 [experts].

    `shared`: every row also takes, last and with weight 1, the expert behind the router's.
    `uniform`, for benchmarks alone: experts that chance decides, each as often as the others, with the
    weights that the router gives them. A logit that is no number is the worst of all.
    """
    m = logits.shape[0]
    experts = torch.empty(m, spec.per_row + shared, dtype=torch.int32, device=logits.device)
    weights = torch.empty(m, spec.per_row + shared, dtype=torch.float32, device=logits.device)
    _choose[(m,)](
        *(logits, logits.stride(0), correction, experts, weights),
        EXPERTS=spec.experts,
        PER_ROW=spec.per_row,
        SIGMOID=spec.scores == "sigmoid",
        NORMALISED=spec.normalised,
        SCALE=spec.scale,
        GROUPS=spec.groups,
        KEPT=spec.kept_groups,
        BEST=spec.group_best,
        ROWS=triton.next_power_of_2(spec.groups),
        SIDE=triton.next_power_of_2(spec.experts // spec.groups),
        SHARED=shared,
        UNIFORM=uniform,
        PDL=pdl,
        num_warps=1 if spec.experts <= 256 else 2,
        launch_pdl=pdl,
    )
    return Chosen(experts, weights)


def group(chosen: torch.Tensor, experts: int, rows: int, pdl: bool = False) -> Grouped:
    """chosen int32 [m, per_row], of `experts` experts, in blocks of `rows` choices.

    A choice of no expert (-1) is left out: no block has it, and the order ends before its end.
    """
    count, device = chosen.numel(), chosen.device
    order = torch.empty(count, dtype=torch.int32, device=device)
    most = most_blocks(count, experts, rows)
    blocks = torch.empty(3 * most + 1, dtype=torch.int32, device=device)
    chunk = min(_CHUNK, max(_LEAST, triton.next_power_of_2(count)))
    chunks = triton.cdiv(count, chunk)
    counts = torch.empty(chunks, experts, dtype=torch.int32, device=device)
    sizes = {"EXPERTS": experts, "SLOTS": triton.next_power_of_2(experts), "CHUNK": chunk, "PDL": pdl}
    sizes["COLUMN"] = min(chunk, _COLUMN)
    # For the registers: a program holds COLUMN choices beside every expert.
    warps = min(max(sizes["SLOTS"] * sizes["COLUMN"] // _PAIRS, 4), 16)
    if chunks > 1:
        _count[(chunks,)](chosen, counts, count, **sizes, num_warps=warps, launch_pdl=pdl)
    _place[(chunks,)](
        *(chosen, counts, order, blocks, count, most, chunks),
        **sizes,
        ROWS=rows,
        ALONE=chunks == 1,
        num_warps=warps if chunk <= _COLUMN else max(warps, 8),
        launch_pdl=pdl,
    )
    return Grouped(order, blocks, rows)


@triton.jit
def _choose(
    logits, stride, correction, experts, weights,
    EXPERTS: tl.constexpr, PER_ROW: tl.constexpr, SIGMOID: tl.constexpr, NORMALISED: tl.constexpr,
    SCALE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr,
    ROWS: tl.constexpr, SIDE: tl.constexpr, SHARED: tl.constexpr, UNIFORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row; its experts stand as [groups, experts of a group], both padded."""
    after_previous(PDL)
    row = tl.program_id(0)
    of_group: tl.constexpr = EXPERTS // GROUPS
    TAKEN: tl.constexpr = PER_ROW + SHARED
    group, place = tl.arange(0, ROWS)[:, None], tl.arange(0, SIDE)[None, :]
    expert = group * of_group + place
    there = (group < GROUPS) & (place < of_group)
    logit = tl.load(logits + row.to(tl.int64) * stride + expert, mask=there, other=float("-inf"))
    logit = tl.where(
        there, tl.minimum(tl.maximum(tl.where(logit == logit, logit, -MOST), -MOST), MOST), logit
    )
    if SIGMOID:
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-logit))
    else:
        raised = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        scores = tl.div_rn(raised, tl.sum(tl.sum(raised, 1), 0))
    wanted = scores
    if correction is not None:
        wanted += tl.load(correction + expert, mask=there, other=0.0)
    open_ = there
    if KEPT < GROUPS:
        open_ = there & (_kept(wanted, there, GROUPS, KEPT, BEST, ROWS, EXPERTS)[:, None] > 0)
    offset = 0
    if UNIFORM:
        offset = _by_chance(tl.sum(tl.sum(tl.where(expert == 0, logit, 0.0), 1), 0), row) % EXPERTS
    rank = tl.arange(0, 32)
    taken_weights = tl.zeros((32,), tl.float32)
    total = 0.0
    for k in tl.static_range(PER_ROW):
        best = _first_best(wanted, open_, expert, EXPERTS)
        if UNIFORM:
            best = (offset + k * EXPERTS // PER_ROW) % EXPERTS
        open_ = open_ & (expert != best)
        score = tl.sum(tl.sum(tl.where((expert == best) & there, scores, 0.0), 1), 0)
        total += score
        taken_weights = tl.where(rank == k, score, taken_weights)
        tl.store(experts + row * TAKEN + k, best)
    if NORMALISED:
        taken_weights = tl.div_rn(taken_weights, tl.zeros((32,), tl.float32) + (total + TINY))
    taken_weights *= SCALE
    if SHARED:
        tl.store(experts + row * TAKEN + PER_ROW, EXPERTS)
        taken_weights = tl.where(rank == PER_ROW, 1.0, taken_weights)
    tl.store(weights + row * TAKEN + rank, taken_weights, mask=rank < TAKEN)


@triton.jit
def _first_best(values, open_, index, NONE: tl.constexpr):
    """The lowest index of the largest of the `open_` values; none is larger than -inf if all are that."""
    best = tl.max(tl.max(tl.where(open_, values, float("-inf")), 1), 0)
    found = tl.min(tl.min(tl.where(open_ & (values == best), index, NONE), 1), 0)
    return tl.minimum(found, NONE - 1)


@triton.jit
def _kept(
    wanted, there, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr, ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    """1 for the KEPT best groups, [ROWS]: a group is as good as the sum of its BEST best scores."""
    group = tl.arange(0, ROWS)
    place = tl.arange(0, wanted.shape[1])[None, :] + tl.zeros((ROWS, 1), tl.int32)
    left = there
    good = tl.zeros((ROWS,), tl.float32)
    for _ in tl.static_range(BEST):
        best = tl.max(tl.where(left, wanted, float("-inf")), 1)
        first = tl.min(tl.where(left & (wanted == best[:, None]), place, EXPERTS), 1)
        left = left & (place != first[:, None])
        good += best
    open_ = group < GROUPS
    for _ in tl.static_range(KEPT):
        best = tl.max(tl.where(open_, good, float("-inf")), 0)
        first = tl.min(tl.where(open_ & (good == best), group, ROWS), 0)
        open_ = open_ & (group != first)
    return tl.where((group < GROUPS) & (open_ == 0), 1, 0)


@triton.jit
def _by_chance(logit, row):
    """A number that nothing but a row's logit and its place decide, int32, not negative."""
    x = logit.to(tl.uint32, bitcast=True) ^ (row.to(tl.uint32) * 0x9E3779B1)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return ((x ^ (x >> 16)) >> 1).to(tl.int32)


@triton.jit(do_not_specialize=["count"])
def _count(
    chosen, counts, count,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, COLUMN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """How often each expert is chosen in one chunk."""
    after_previous(PDL)
    expert = tl.arange(0, SLOTS)
    found = _count_chunk(chosen, tl.program_id(0), count, SLOTS, CHUNK, COLUMN)
    tl.store(counts + tl.program_id(0) * EXPERTS + expert, found, mask=expert < EXPERTS)


@triton.jit(do_not_specialize=["count", "most", "chunks"])
def _place(
    chosen, counts, order, blocks, count, most, chunks,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, COLUMN: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Puts the choices of one chunk in their places; the first program cuts the order into blocks."""
    after_previous(PDL)
    chunk = tl.program_id(0)
    expert = tl.arange(0, SLOTS)
    if ALONE:
        total = _count_chunk(chosen, 0, count, SLOTS, CHUNK, COLUMN)
        before = tl.zeros((SLOTS,), tl.int32)
    else:
        total, before = tl.zeros((SLOTS,), tl.int32), tl.zeros((SLOTS,), tl.int32)
        for other in range(chunks):
            found = tl.load(counts + other * EXPERTS + expert, mask=expert < EXPERTS, other=0)
            total += found
            before += tl.where(other < chunk, found, 0)
    first = tl.cumsum(total, 0) - total
    own = first + before
    for at in tl.static_range(0, CHUNK, COLUMN):
        choice = chunk * CHUNK + at + tl.arange(0, COLUMN)
        mine = tl.load(chosen + choice, mask=choice < count, other=-1)
        rank = tl.zeros((COLUMN,), tl.int32)
        for behind in tl.static_range(0, at + 1, COLUMN):
            other = chunk * CHUNK + behind + tl.arange(0, COLUMN)
            theirs = tl.load(chosen + other, mask=other < count, other=-2)
            same = (theirs[None, :] == mine[:, None]) & (other[None, :] < choice[:, None])
            rank += tl.sum(same.to(tl.int32), 1)
        begins = tl.sum(tl.where(mine[:, None] == expert[None, :], own[None, :], 0), 1)
        tl.store(order + begins + rank, choice, mask=mine >= 0)
    if chunk == 0:
        of_expert = (total + ROWS - 1) // ROWS
        first_block = tl.cumsum(of_expert, 0) - of_expert
        _cut(blocks, expert, total, first, first_block, of_expert, most, ROWS)


@triton.jit
def _count_chunk(chosen, chunk, count, SLOTS: tl.constexpr, CHUNK: tl.constexpr, COLUMN: tl.constexpr):
    """int32 [SLOTS]."""
    expert = tl.arange(0, SLOTS)
    found = tl.zeros((SLOTS,), tl.int32)
    for at in tl.static_range(0, CHUNK, COLUMN):
        choice = chunk * CHUNK + at + tl.arange(0, COLUMN)
        theirs = tl.load(chosen + choice, mask=choice < count, other=-1)
        found += tl.sum((theirs[None, :] == expert[:, None]).to(tl.int32), 1)
    return found


@triton.jit
def _cut(blocks, expert, total, first, first_block, of_expert, most, ROWS: tl.constexpr):
    """Every block by its expert, as many rounds as the fullest has blocks; and their number."""
    for nth in range(tl.max(of_expert, 0)):
        at = blocks + first_block + nth
        here = nth < of_expert
        begins = first + nth * ROWS
        tl.store(at, expert, mask=here)
        tl.store(at + most, begins, mask=here)
        tl.store(at + 2 * most, tl.minimum(begins + ROWS, first + total), mask=here)
    tl.store(blocks + 3 * most, tl.sum(of_expert, 0))
