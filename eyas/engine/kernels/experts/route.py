"""Chooses the experts of each row: `eyas.engine.layers.routing.choose`, in float32.

Scores, groups, the best, of equals the first, and their weights. No sum of numbers is taken by an atomic; how
often experts are chosen is, in integers, where some have replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.kernels.experts.group import GroupedChoices
from eyas.engine.kernels.experts.row_choice import CLOSED, LAST, TINY, bounded, by_chance, ranked
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import power_of_2


@dataclass(frozen=True)
class ChosenExperts:
    """The experts of m rows, best first, and their weights: int32 and float32 [m, per_row, or one more].

    `order`: of the choices, where the kernel that made them has made it too.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    order: GroupedChoices | None = None


@dataclass(frozen=True)
class LocalExperts:
    """The experts of `experts` that are here, numbered from 0; the choice of another is -1, which is none.

    `rows`: whose shared expert is here; it stands behind them. `kv_rows` int32 [m]: -1 for rows of padding,
    which choose none. With `copies` some experts have replicas, and `experts` are the slots that are here.
    """

    experts: range
    rows: range
    kv_rows: torch.Tensor
    copies: ExpertCopies | None = None


@dataclass(frozen=True)
class ExpertCopies:
    """`table` int32 [experts, 1 + ranks]: the number of each expert's copies, then their slots. `loads` int32
    [experts] counts how often `rows` of `LocalExperts` choose each.

    Row i of rank r takes copy number (i + r + expert) modulo their number.
    """

    table: torch.Tensor
    loads: torch.Tensor


@dataclass(frozen=True)
class Router:
    """The rule by which logits choose experts. `correction`: float32 [experts]; `bias`, of the logits, as
    wide or wider.

    `shared`: every row also takes, last, the expert behind the router's; with weight 1, or, where its spec
    has a `shared_share`, with the sigmoid of the logit behind the experts'.
    """

    spec: ExpertsSpec
    correction: torch.Tensor | None = None
    shared: bool = False
    bias: torch.Tensor | None = None


def choose(
    logits: torch.Tensor,
    spec: ExpertsSpec,
    correction: torch.Tensor | None = None,
    *,
    shared: bool = False,
    uniform: bool = False,
    pdl: bool = False,
) -> ChosenExperts:
    """logits float32 [m, at least experts] -> what their rows take. `correction`, `shared`: of `Router`.

    `uniform`, for benchmarks alone: experts that chance decides, each as often as the others, with the
    weights that the router gives them. A logit that is no number is the worst of all.
    """
    return choose_local(logits, Router(spec, correction, shared), None, uniform=uniform, pdl=pdl)


@dataclass(frozen=True)
class ChoicePlan:
    """How a row's choice follows from its logits: a kernel's compile-time parameters. Experts stand as [rows,
    side], a group in each row, both filled up. `local`: how many experts are here, if not all are; `width`:
    of a row of `ExpertCopies.table`, if some have replicas.
    """

    experts: int
    per_row: int
    sigmoid: bool
    normalised: bool
    scale: float
    groups: int
    topk_groups: int
    best: int
    rows: int
    side: int
    shared: bool
    share: bool
    uniform: bool
    local: int = 0
    width: int = 0

    @classmethod
    def of(cls, router: Router, uniform: bool, local: LocalExperts | None = None) -> ChoicePlan:
        """The plan of a router."""
        spec, copies = router.spec, None if local is None else local.copies
        return cls(
            experts=spec.experts,
            per_row=spec.per_row,
            sigmoid=spec.scores == "sigmoid",
            normalised=spec.normalised,
            scale=spec.scale,
            groups=spec.groups,
            topk_groups=spec.topk_groups,
            best=spec.group_best,
            rows=power_of_2(spec.groups),
            side=power_of_2(spec.experts // spec.groups),
            shared=router.shared,
            share=spec.shared_share,
            uniform=uniform,
            local=0 if local is None else len(local.experts),
            width=0 if copies is None else copies.table.shape[1],
        )

    @property
    def taken(self) -> int:
        """Choices of a row."""
        return self.per_row + self.shared

    @property
    def warps(self) -> int:
        """Warps of a program, which has one row."""
        return 1 if self.experts <= 256 else 2


def choose_local(
    logits: torch.Tensor,
    router: Router,
    local: LocalExperts | None,
    *,
    uniform: bool = False,
    pdl: bool = False,
) -> ChosenExperts:
    """Chooses as `choose`, where other ranks have other experts."""
    own, rows = (range(0), range(0)) if local is None else (local.experts, local.rows)
    copies, plan = None if local is None else local.copies, ChoicePlan.of(router, uniform, local)
    chosen = room_for_choices(logits.shape[0], plan, logits)
    _choose[(logits.shape[0],)](
        *(logits, logits.stride(0), router.bias, router.correction, chosen.experts, chosen.weights),
        *(None if local is None else local.kv_rows, own.start, rows.start, rows.stop),
        *((None, None) if copies is None else (copies.table, copies.loads)),
        plan,
        PDL=pdl,
        num_warps=plan.warps,
        launch_pdl=pdl,
    )
    return chosen


def room_for_choices(m: int, plan: ChoicePlan, like: torch.Tensor) -> ChosenExperts:
    """Room for what m rows take, on the device of `like`."""
    experts = torch.empty(m, plan.taken, dtype=torch.int32, device=like.device)
    return ChosenExperts(experts, torch.empty(m, plan.taken, dtype=torch.float32, device=like.device))


@kernel(do_not_specialize=["first", "first_row", "end_row"])
def _choose(
    logits, stride, bias, correction, experts, weights, kv_rows, first, first_row, end_row, table, loads,
    plan: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row. Of experts that are here the first is `first`."""
    after_previous(PDL)
    row = tl.program_id(0)
    expert, there = experts_of(plan)
    own = logits + row.to(tl.int64) * stride
    logit = tl.load(own + expert, mask=there, other=float("-inf"))
    if bias is not None:
        logit += tl.load(bias + expert, mask=there, other=0.0)
    taken, taken_weights = best_of(tl.where(there, bounded(logit), logit), correction, row, plan)
    rank = tl.arange(0, 32)
    routed = rank < plan.per_row
    if plan.local > 0:
        taken = _numbers_here(taken, routed, row, kv_rows, first, first_row, end_row, table, loads, plan)
    if plan.shared:
        last = _shared_number(kv_rows, row, first_row, end_row, plan)
        taken = tl.where(rank == plan.per_row, last, taken)
        share = _share_of(own + plan.experts, plan.share)
        taken_weights = tl.where(rank == plan.per_row, share, taken_weights)
    put(experts, weights, row, taken, taken_weights, plan)


@triton.jit
def experts_of(plan: tl.constexpr):
    """The number of the expert in each place [rows, side], and which places have one."""
    of_group: tl.constexpr = plan.experts // plan.groups
    group, place = tl.arange(0, plan.rows)[:, None], tl.arange(0, plan.side)[None, :]
    return group * of_group + place, (group < plan.groups) & (place < of_group)


@triton.jit
def put(experts, weights, row, taken, taken_weights, plan: tl.constexpr):
    """Writes what a row takes, [32]."""
    rank = tl.arange(0, 32)
    tl.store(experts + row * plan.taken + rank, taken, mask=rank < plan.taken)
    tl.store(weights + row * plan.taken + rank, taken_weights, mask=rank < plan.taken)


@triton.jit
def best_of(logit, correction, row, plan: tl.constexpr):
    """The experts that a row takes by its logits [rows, side], best first, int32 [32], and their weights,
    float32 [32]; where it takes a shared one too, its own stand before that one's.
    """
    expert, there = experts_of(plan)
    EXPERTS: tl.constexpr = plan.experts
    PER_ROW: tl.constexpr = plan.per_row
    scores = _scored(logit, plan.sigmoid)
    merit = scores
    if correction is not None:
        merit += tl.load(correction + expert, mask=there, other=0.0)
    open_ = there
    if plan.topk_groups < plan.groups:
        open_ = there & (_open_groups(merit, there, plan)[:, None] > 0)
    offset = 0
    if plan.uniform:
        offset = by_chance(tl.sum(tl.sum(tl.where(expert == 0, logit, 0.0), 1), 0), row) % EXPERTS
    SLOTS: tl.constexpr = plan.rows * plan.side
    ids = tl.reshape(tl.where(there, expert, EXPERTS), (SLOTS,))
    scores = tl.reshape(scores, (SLOTS,))
    left = tl.reshape(tl.where(open_, ranked(merit, expert), CLOSED), (SLOTS,))
    rank = tl.arange(0, 32)
    taken, taken_weights, total = tl.zeros((32,), tl.int32), tl.zeros((32,), tl.float32), 0.0
    for k in tl.static_range(PER_ROW):
        best = tl.minimum(-(tl.max(left) & LAST).to(tl.int32) + LAST, EXPERTS - 1)
        if plan.uniform:
            best = (offset + k * EXPERTS // PER_ROW) % EXPERTS
        left = tl.where(ids == best, CLOSED, left)
        score = tl.sum(tl.where(ids == best, scores, 0.0))
        total += score
        taken_weights = tl.where(rank == k, score, taken_weights)
        taken = tl.where(rank == k, best, taken)
    if plan.normalised:
        taken_weights = tl.div_rn(taken_weights, tl.zeros((32,), tl.float32) + (total + TINY))
    return taken, taken_weights * plan.scale


@triton.jit
def _scored(logit, SIGMOID: tl.constexpr):
    """Scores of logits [groups, experts of a group]."""
    if SIGMOID:
        return tl.div_rn(1.0, 1.0 + tl.exp(-logit))
    else:
        raised = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        return tl.div_rn(raised, tl.sum(tl.sum(raised, 1), 0))


@triton.jit
def _numbers_here(
    taken, chosen, row, kv_rows, first, first_row, end_row, table, loads, plan: tl.constexpr
):  # fmt: skip
    """The numbers of a row's experts among those that are here; -1: it is not, or the row is padding.
    Where some have replicas, choices of this rank's rows are counted."""
    chosen &= tl.load(kv_rows + row) >= 0
    slot = taken
    if plan.width > 0:
        slot = _slot_of(taken, table, row, end_row - first_row, chosen, plan.width)
        own = chosen & (row >= first_row) & (row < end_row)
        tl.atomic_add(loads + taken, tl.full(taken.shape, 1, tl.int32), mask=own, sem="relaxed")
    return tl.where(chosen & (slot >= first) & (slot < first + plan.local), slot - first, -1)


@triton.jit
def _share_of(logit, SHARE: tl.constexpr):
    """The weight of the shared expert, by its logit if it has one."""
    share = 1.0
    if SHARE:
        share = tl.div_rn(1.0, 1.0 + tl.exp(-tl.load(logit)))
    return share


@triton.jit
def _slot_of(taken, table, row, rows, chosen, WIDTH: tl.constexpr):
    """The slots of experts of which some have replicas, for a row; each rank has `rows` of them."""
    copies = tl.load(table + taken * WIDTH, mask=chosen, other=1)
    turn = row // rows + row % rows + taken
    return tl.load(table + taken * WIDTH + 1 + turn % copies, mask=chosen, other=0)


@triton.jit
def _shared_number(kv_rows, row, first_row, end_row, plan: tl.constexpr):
    """The number of the shared expert, behind those that are here; -1 for another rank's rows, and
    padding.
    """
    number = plan.experts
    if plan.local > 0:
        here = (row >= first_row) & (row < end_row) & (tl.load(kv_rows + row) >= 0)
        number = tl.where(here, plan.local, -1)
    return number


@triton.jit
def _open_groups(merit, there, plan: tl.constexpr):
    """1 for the best groups, [rows]: a group is as good as the sum of its best scores."""
    BEST: tl.constexpr = plan.best
    TOPK_GROUPS: tl.constexpr = plan.topk_groups
    ROWS: tl.constexpr = plan.rows
    group = tl.arange(0, ROWS)
    place = tl.arange(0, plan.side)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    left = there
    good = tl.zeros((ROWS,), tl.float32)
    for _ in tl.static_range(BEST):
        best = tl.max(tl.where(left, merit, float("-inf")), 1)
        first = tl.min(tl.where(left & (merit == best[:, None]), place, plan.experts), 1)
        left = left & (place != first[:, None])
        good += best
    open_ = group < plan.groups
    for _ in tl.static_range(TOPK_GROUPS):
        best = tl.max(tl.where(open_, good, float("-inf")), 0)
        first = tl.min(tl.where(open_ & (good == best), group, ROWS), 0)
        open_ = open_ & (group != first)
    return tl.where((group < plan.groups) & (open_ == 0), 1, 0)
