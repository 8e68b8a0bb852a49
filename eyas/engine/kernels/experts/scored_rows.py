"""Up to 32 rows on their way to experts in FP8: residual, norm, router and rounding in one launch.

A norm multiplies a whole row by one number, which a product of the row and a scale of its blocks may meet
later as well as sooner. So programs share the router's rows and k: each adds what the residual still waits
for, and leaves parts of logits; others beside them round the row times the norm's gain, and leave parts of
its squares' sum. `choose` adds a row's parts up, in order, and multiplies logits and scales by the number
that the norm would have multiplied the row by. What it computes is no `exact` arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.kernels.experts.route import (
    ChoicePlan,
    ChosenExperts,
    Router,
    best_of,
    experts_of,
    put,
    room_for_choices,
)
from eyas.engine.kernels.experts.row_choice import bounded
from eyas.engine.kernels.launch.launching import after_previous, call_ahead, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.kernels.products.blocks import SIDE, Fp8Rows, quantised, room_for
from eyas.engine.kernels.products.rows import NormInput
from eyas.engine.kernels.products.skinny import empty_padded

MOST_ROWS = 32
"""Of more, launches of their own are as fast: the parts of their logits take as long as the launches."""

_FEW = 16  # rows, up to which a program takes more of k and fewer experts
LINE = 128  # bytes of a line of L2
_LINE = tl.constexpr(LINE)
_NUMBERS = tl.constexpr(LINE // 2)  # of 16 bits, in a line


@dataclass(frozen=True)
class ScorePlan:
    """The kernels' compile-time parameters. `tall`, `each`, `depth`: rows, experts and columns of a program;
    `parts`: of k.
    """

    hidden: int
    experts: int
    tall: int
    each: int
    depth: int
    powers: bool
    pdl: bool

    @classmethod
    def of(cls, m: int, weight: torch.Tensor, router: Router, powers: bool, pdl: bool) -> ScorePlan:
        """The plan for m rows."""
        few = m <= _FEW
        return cls(
            hidden=weight.shape[1],
            experts=router.spec.experts,
            tall=max(16, power_of_2(m)),
            each=32 if few else 64,
            depth=512 if few else 256,
            powers=powers,
            pdl=pdl,
        )

    @property
    def tiles(self) -> int:
        """Programs that share the experts."""
        return cdiv(self.experts, self.each)

    @property
    def parts(self) -> int:
        """Parts of k."""
        return cdiv(self.hidden, self.depth)

    @property
    def blocks(self) -> int:
        """Scales of a row."""
        return cdiv(self.hidden, SIDE)

    @property
    def side(self) -> int:
        """Scales of a row, filled up."""
        return power_of_2(self.blocks)


@dataclass(frozen=True)
class ScoredRows:
    """Rows whose residual [m, hidden] is whole, and what else `score` leaves of them.

    `rounded`: the rows times the norm's gain, whose scales `choose` finishes. logits float32 [parts, m,
    experts] and squares float32 [parts, m]: to be added up.
    """

    residual: torch.Tensor
    rounded: Fp8Rows
    logits: torch.Tensor
    squares: torch.Tensor
    plan: ScorePlan


def can_score(m: int, hidden: int, rounding: RowRounding | None, router: Router) -> bool:
    """Whether `score` takes m rows [m, hidden] that are rounded so, and `choose` the router."""
    blocks = rounding is not None and rounding.rows == "block" and hidden % SIDE == 0
    return m <= MOST_ROWS and blocks and router.bias is None and not router.spec.shared_share


def score(
    rows: tuple[torch.Tensor, torch.Tensor | None],
    norm: NormInput,
    weight: torch.Tensor,
    router: Router,
    ahead: torch.Tensor | None = None,
    pdl: bool = False,
) -> ScoredRows:
    """rows: x and `added` [m, hidden], of which the sum is the residual, rounded; weight [at least experts,
    hidden]: the router's. `ahead`: what is called into L2 meanwhile, since all rows will be multiplied by it.
    """
    (x, added), rounding = rows, norm.rounding
    m, hidden = x.shape
    assert rounding is not None and norm.gain is not None
    plan = ScorePlan.of(m, weight, router, rounding.powers, pdl)
    scored = ScoredRows(
        empty_padded(m, hidden, like=x),
        room_for(x, rounding),
        x.new_empty(plan.parts, m, plan.experts, dtype=torch.float32),
        x.new_empty(plan.parts, m, dtype=torch.float32),
        plan,
    )
    size = 0 if ahead is None else ahead.numel() * ahead.element_size()
    each = power_of_2(cdiv(size, LINE * (plan.tiles + 1) * plan.parts))
    _score[(plan.tiles + 1, plan.parts)](
        *(x, added, norm.gain, weight, scored.residual, scored.rounded.stored, scored.rounded.scales),
        *(scored.logits, scored.squares, None if ahead is None else ahead.view(torch.int8), size, m, plan),
        AHEAD=each,
        num_warps=8,
        launch_pdl=pdl,
    )
    return scored


def choose(scored: ScoredRows, router: Router, eps: float, uniform: bool = False) -> ChosenExperts:
    """What the rows take; `uniform` as of `route.choose`. Finishes the scales of `scored.rounded`."""
    plan, score_plan, m = ChoicePlan.of(router, uniform), scored.plan, scored.logits.shape[1]
    chosen = room_for_choices(m, plan, scored.logits)
    _choose_scored[(m,)](
        *(scored.logits, scored.squares, scored.rounded.scales, router.correction),
        *(chosen.experts, chosen.weights, m, eps, plan, score_plan),
        num_warps=plan.warps,
        launch_pdl=score_plan.pdl,
    )
    return chosen


@kernel(do_not_specialize=["size", "m"])
def _score(
    x, added, gain, weight, out, stored, scales, logits, squares, ahead, size, m, plan: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of experts, and one that rounds; parts of k)."""
    tile, part = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, plan.tall)
    column = part * plan.depth + tl.arange(0, plan.depth)
    within = column < plan.hidden
    gains = tl.load(gain + column, mask=within, other=0.0).to(tl.float32)
    expert = tile * plan.each + tl.arange(0, plan.each)
    here = (expert < plan.experts)[:, None] & within[None, :]
    its = weight + expert[:, None] * plan.hidden
    if plan.pdl and tile < plan.tiles:
        line = part * plan.depth + tl.arange(0, plan.depth // _NUMBERS) * _NUMBERS
        call_ahead(weight + tl.minimum(expert, plan.experts - 1)[:, None] * plan.hidden
                   + tl.minimum(line, plan.hidden - 1)[None, :])  # fmt: skip
    if plan.pdl and ahead is not None:
        own = ((part * (plan.tiles + 1) + tile) * AHEAD + tl.arange(0, AHEAD)) * _LINE
        call_ahead(ahead + tl.minimum(own, size - 1))
    after_previous(plan.pdl)
    inside = (row < m)[:, None] & within[None, :]
    at = row[:, None] * plan.hidden + column[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        values += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
    made = values.to(x.dtype.element_ty)
    gained = (made.to(tl.float32) * gains[None, :]).to(x.dtype.element_ty)
    if tile < plan.tiles:
        rows_of_router = tl.load(its + column[None, :], mask=here, other=0.0)
        total = tl.dot(gained, rows_of_router.T, input_precision="ieee")
        to = logits + (part * m + row)[:, None] * plan.experts + expert[None, :]
        tl.store(to, total, mask=(row < m)[:, None] & (expert < plan.experts)[None, :])
    else:
        wide = made.to(tl.float32)
        tl.store(out + at, made, mask=inside)
        tl.store(squares + part * m + row, tl.sum(wide * wide, 1), mask=row < m)
        EACH: tl.constexpr = plan.depth // 128
        count: tl.constexpr = plan.tall * EACH
        rounded, scale = quantised(tl.reshape(gained, (count, 128)), plan.powers)
        tl.store(stored + at, tl.reshape(rounded, (plan.tall, plan.depth)), mask=inside)
        block = part * EACH + tl.arange(0, EACH)
        there = (row < m)[:, None] & (block < plan.blocks)[None, :]
        by_row = scales + row[:, None] * plan.blocks + block[None, :]
        tl.store(by_row, tl.reshape(scale, (plan.tall, EACH)), mask=there)


@kernel(do_not_specialize=["m"])
def _choose_scored(
    logits, squares, scales, correction, experts, weights, m, eps, plan: tl.constexpr, scored: tl.constexpr
):  # fmt: skip
    """One row."""
    after_previous(scored.pdl)
    row = tl.program_id(0)
    expert, there = experts_of(plan)
    logit, total = tl.zeros(expert.shape, tl.float32), 0.0
    PARTS: tl.constexpr = scored.parts
    for part in tl.static_range(PARTS):
        at = part * m + row
        logit += tl.load(logits + at * plan.experts + expert, mask=there, other=0.0)
        total += tl.load(squares + at)
    factor = tl.rsqrt(total / scored.hidden + eps)
    block = tl.arange(0, scored.side)
    own = scales + row * scored.blocks + block
    tl.store(own, tl.load(own, mask=block < scored.blocks) * factor, mask=block < scored.blocks)
    logit = tl.where(there, logit * factor, float("-inf"))
    taken, taken_weights = best_of(tl.where(there, bounded(logit), logit), correction, row, plan)
    if plan.shared:
        rank = tl.arange(0, 32)
        taken = tl.where(rank == plan.per_row, plan.experts, taken)
        taken_weights = tl.where(rank == plan.per_row, 1.0, taken_weights)
    put(experts, weights, row, taken, taken_weights, plan)
