"""Few rows on their way to their experts in one launch: norm, router, choice, and the order of choices.

Programs have a row of the router each, in registers before the rows are there, and leave the logits of some
rows; the last one to arrive chooses for all rows, and puts what they chose in order. So one launch is what
four or five would be, each of which takes about two microseconds, whatever it does. Rows lie along the lanes
of a warp, what is searched or counted across them: few sums go from lane to lane. No sum has an order that
holds for all numbers of rows: this is no exact arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.kernels.experts.group import GroupedChoices, OrderSizes
from eyas.engine.kernels.experts.grouped_tiles import most_blocks
from eyas.engine.kernels.experts.route import ChosenExperts, Router
from eyas.engine.kernels.experts.row_choice import CLOSED, LAST, TINY, bounded, by_chance, ranked
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import power_of_2
from eyas.engine.kernels.products.skinny import ProductLaunch, SkinnyInput, empty_padded
from eyas.engine.kernels.products.skinny_kernels import SUMS_WIDTH

FEWEST_ROWS, MOST_ROWS = 9, 32
"""Of fewer `single` makes the router's product, and the launches take no longer."""

MOST_CHOICES = 128
"""Of all rows, each compared with each; rows, and the choices of a row, are filled up to powers of two."""

_TOGETHER = (
    4,
    8,
)  # rows that a program meets, one after the other: the fewer, where all programs run at once
_AT_ONCE = 264  # programs
_LONGEST = 8192  # elements of a row that a program's registers hold


@dataclass(frozen=True)
class RouterProduct:
    """A router's rows [at least experts, hidden], the norm of what they meet, and what becomes of logits.

    `gain` [hidden] and `eps`: of the norm. `uniform`: as of `route.choose`.
    """

    weight: torch.Tensor
    gain: torch.Tensor
    eps: float
    router: Router
    uniform: bool = False


@dataclass(frozen=True)
class RoutePlan:
    """The kernel's compile-time parameters. `rows`, `side`, `slots`: rows, experts and a row's choices, each
    filled up to a power of two. `together`: rows of a program. `height`: rows of a block of the order (0:
    there is none).
    """

    rows: int
    together: int
    experts: int
    side: int
    per_row: int
    shared: bool
    slots: int
    sigmoid: bool
    normalised: bool
    scale: float
    uniform: bool
    height: int
    pdl: bool
    hidden: int
    block: int
    parts: int
    eps: float

    @property
    def taken(self) -> int:
        """Choices of a row."""
        return self.per_row + self.shared

    @property
    def choices(self) -> int:
        """Choices of all rows, filled up."""
        return self.rows * self.slots


def can_take(rows: int, spec: ExpertsSpec, shared: bool, hidden: int) -> bool:
    """Whether `take` takes this number of rows [rows, hidden]."""
    choices = power_of_2(rows) * power_of_2(spec.per_row + shared)
    few = FEWEST_ROWS <= rows <= MOST_ROWS and choices <= MOST_CHOICES
    fits = spec.experts >= max(_TOGETHER) and hidden <= _LONGEST
    return few and fits and spec.groups == spec.topk_groups


def take(
    source: SkinnyInput, product: RouterProduct, order: OrderSizes | None, launch: ProductLaunch
) -> tuple[torch.Tensor, ChosenExperts]:
    """The norm of `source`, whose sums of squares are there, and what its rows take, with their order."""
    x, sums, router = source.x, source.sums, product.router
    assert sums is not None
    (m, hidden), spec = x.shape, router.spec
    normed = empty_padded(m, hidden, like=x)
    logits = torch.empty(m, spec.experts, dtype=torch.float32, device=x.device)
    chosen = _room(m, router, order, x.device)
    plan = RoutePlan(
        rows=power_of_2(m),
        together=_together(m, spec.experts),
        experts=spec.experts,
        side=power_of_2(spec.experts),
        per_row=spec.per_row,
        shared=router.shared,
        slots=power_of_2(spec.per_row + router.shared),
        sigmoid=spec.scores == "sigmoid",
        normalised=spec.normalised,
        scale=spec.scale,
        uniform=product.uniform,
        height=order.rows if order else 0,
        pdl=launch.pdl,
        hidden=hidden,
        block=power_of_2(hidden),
        parts=power_of_2(len(sums)),
        eps=product.eps,
    )
    _route_rows[(spec.experts, plan.rows // plan.together)](
        *(x, sums, product.gain, product.weight, logits, normed, router.bias, router.correction),
        *_parts(chosen),
        *(launch.tickets, m, len(sums)),
        plan,
        num_warps=8,
        launch_pdl=plan.pdl,
    )
    return normed, chosen


def _together(m: int, experts: int) -> int:
    few, many = _TOGETHER
    return few if experts * power_of_2(m) <= few * _AT_ONCE else many


def _room(m: int, router: Router, order: OrderSizes | None, device: torch.device) -> ChosenExperts:
    taken = router.spec.per_row + router.shared
    experts = torch.empty(m, taken, dtype=torch.int32, device=device)
    weights = torch.empty(m, taken, dtype=torch.float32, device=device)
    if order is None:
        return ChosenExperts(experts, weights)
    most = most_blocks(m * taken, order.experts, order.rows)
    walked, blocks = (torch.empty(n, dtype=torch.int32, device=device) for n in (m * taken, 3 * most + 1))
    return ChosenExperts(experts, weights, GroupedChoices(walked, blocks, order.rows))


def _parts(chosen: ChosenExperts) -> tuple[torch.Tensor | int | None, ...]:
    """Choices, weights, order, blocks, and the most blocks."""
    order = chosen.order
    both = (None, None, 0) if order is None else (order.order, order.blocks, order.most)
    return chosen.experts, chosen.weights, *both


@kernel(do_not_specialize=["most", "m", "parts"])
def _route_rows(
    x, sums, gain, weight, logits, normed, bias, correction, experts, weights, order, blocks, most, tickets,
    m, parts, plan: tl.constexpr,
):  # fmt: skip
    """Grid (experts, groups of rows): logits of an expert for some rows, and the norm of one of them."""
    expert, first = tl.program_id(0), tl.program_id(1) * plan.together
    column = tl.arange(0, plan.block)
    inside = column < plan.hidden
    gains = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    its = tl.load(weight + expert * plan.hidden + column, mask=inside, other=0.0).to(tl.float32) * gains
    after_previous(plan.pdl)
    part, row = tl.arange(0, plan.parts)[:, None], tl.arange(0, plan.rows)
    known = (part < parts) & (row < m)[None, :]
    squares = tl.load(sums + part * SUMS_WIDTH + row[None, :], mask=known, other=0.0)
    scale = tl.rsqrt(tl.sum(squares, 0) / plan.hidden + plan.eps)
    TOGETHER: tl.constexpr = plan.together
    for each in tl.static_range(TOGETHER):
        here = first + each
        there = inside & (here < m)
        values = tl.load(x + here * plan.hidden + column, mask=there, other=0.0).to(tl.float32)
        tl.store(logits + here * plan.experts + expert, tl.sum(values * its), mask=here < m)
        if expert == each:
            own = tl.sum(tl.where(row == here, scale, 0.0))
            made = (values * own * gains).to(normed.dtype.element_ty)
            tl.store(normed + here * plan.hidden + column, made, mask=there)
    tl.debug_barrier()  # one thread takes the ticket, for the stores of all
    if tl.atomic_add(tickets, 1, sem="acq_rel") == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(tickets, 0)
        numbers = _choice(logits, scale, bias, correction, experts, weights, m, plan)
        if plan.height > 0:
            _put_in_order(numbers, order, blocks, m, most, plan)


@triton.jit
def _choice(logits, factors, bias, correction, experts, weights, m, plan: tl.constexpr):
    """What all rows take, as `route` has it for one; the experts' numbers [slots, rows]. `factors` [rows]: of
    logits.
    """
    row, expert = tl.arange(0, plan.rows)[None, :], tl.arange(0, plan.side)[:, None]
    there = expert < plan.experts
    at = logits + row * plan.experts + expert
    logit = tl.load(at, mask=there & (row < m), other=0.0, cache_modifier=".cg")  # past L1: others wrote it
    logit *= factors[None, :]
    if bias is not None:
        logit += tl.load(bias + expert, mask=there, other=0.0)
    logit = bounded(logit)
    logit = tl.where(there, logit, float("-inf"))
    if plan.sigmoid:
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-logit))
    else:
        raised = tl.exp(logit - tl.max(logit, 0)[None, :])
        scores = tl.div_rn(raised, tl.zeros_like(raised) + tl.sum(raised, 0)[None, :])
    merit = scores
    if correction is not None:
        merit += tl.load(correction + expert, mask=there, other=0.0)
    left = tl.where(there, ranked(merit, expert), CLOSED)
    slot = tl.arange(0, plan.slots)[:, None]
    numbers = tl.full((plan.slots, plan.rows), plan.experts, tl.int32)
    shares = tl.full((plan.slots, plan.rows), 0.0, tl.float32)
    total = tl.full((plan.rows,), 0.0, tl.float32)
    PER_ROW: tl.constexpr = plan.per_row
    for k in tl.static_range(PER_ROW):
        best = tl.minimum(-(tl.max(left, 0) & LAST).to(tl.int32) + LAST, plan.experts - 1)
        if plan.uniform:
            first = tl.sum(tl.where(expert == 0, logit, 0.0), 0)
            offset = by_chance(first, tl.arange(0, plan.rows)) % plan.experts
            best = (offset + k * plan.experts // plan.per_row) % plan.experts
        mine = expert == best[None, :]
        left = tl.where(mine, CLOSED, left)
        score = tl.sum(tl.where(mine, scores, 0.0), 0)
        total += score
        shares = tl.where(slot == k, score[None, :], shares)
        numbers = tl.where(slot == k, best[None, :], numbers)
    if plan.normalised:
        shares = tl.div_rn(shares, tl.zeros_like(shares) + (total + TINY)[None, :])
    shares *= plan.scale
    if plan.shared:
        shares = tl.where(slot == plan.per_row, 1.0, shares)
    to, stored = row * plan.taken + slot, (row < m) & (slot < plan.taken)
    tl.store(experts + to, numbers, mask=stored)
    tl.store(weights + to, shares, mask=stored)
    return numbers


@triton.jit
def _put_in_order(numbers, order, blocks, m, most, plan: tl.constexpr):
    """The order and the blocks of `group.GroupedChoices`, of choices [slots, rows]. A place is the number of
    smaller keys.
    """
    at = tl.arange(0, plan.choices)
    slot, row = at // plan.rows, at % plan.rows
    real, choice = (row < m) & (slot < plan.taken), row * plan.taken + slot
    expert = tl.where(real, tl.reshape(numbers, (plan.choices,)), plan.experts + 1)
    base = expert * plan.choices
    key = base + tl.where(real, choice, plan.choices - 1)
    place = _smaller(key, key)
    begin, end = _smaller(key, base), _smaller(key, base + plan.choices)
    tl.store(order + place, choice, mask=real)
    begins = real & ((place - begin) % plan.height == 0)
    nth = _smaller(tl.where(begins, key, (plan.experts + 2) * plan.choices), key)
    tl.store(blocks + nth, expert, mask=begins)
    tl.store(blocks + most + nth, place, mask=begins)
    tl.store(blocks + 2 * most + nth, tl.minimum(place + plan.height, end), mask=begins)
    tl.store(blocks + 3 * most, tl.sum(begins.to(tl.int32)))


@triton.jit
def _smaller(keys, bounds):
    """How many keys are smaller than each bound."""
    return tl.sum((keys[:, None] < bounds[None, :]).to(tl.int32), 0)
