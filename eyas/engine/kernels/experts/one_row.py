"""One row on its way to its experts: its norm and its router's product in one launch; to packed experts and
back no launch but for products.

The router's product norms what it reads, and leaves logits, from which each program of the experts' products
finds out by itself whose weight it multiplies (`row_choice`). The product back multiplies what each expert
makes by its share, adds all of it up, and adds the residual. No sum has an order that holds for all numbers
of rows: this is no exact arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.kernels.experts.group import OneRow
from eyas.engine.kernels.experts.grouped_packed import (
    blocks_of,
    call_steps_ahead,
    plan_of,
    product_of,
)
from eyas.engine.kernels.experts.grouped_task import GroupedTask
from eyas.engine.kernels.experts.route_rows import RouterProduct
from eyas.engine.kernels.experts.row_choice import RowChoice, choice_at
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import power_of_2
from eyas.engine.kernels.products.blocks import StoredWeight
from eyas.engine.kernels.products.skinny import MAX_ROWS, ProductLaunch, empty_padded
from eyas.engine.kernels.products.skinny_kernels import SUMS_WIDTH

_LONGEST = 8192  # elements of a row that a program's registers hold
_MOST_EXPERTS = 256  # each is compared with each


@dataclass(frozen=True)
class JudgedRow:
    """A row [1, hidden] that has passed its norm, and its logits, float32 [experts], with their bias."""

    normed: torch.Tensor
    logits: torch.Tensor
    choice: RowChoice

    def order(self, rows: int) -> OneRow:
        """The tiles of `rows` rows that products walk, in their order."""
        return OneRow(self.logits, rows, self.choice)


def can_judge(rows: int, hidden: int, spec: ExpertsSpec) -> bool:
    """Whether `judge` takes this number of rows [rows, hidden]."""
    return can_score(rows, hidden) and spec.experts <= _MOST_EXPERTS


def can_score(rows: int, hidden: int) -> bool:
    """Whether `score` takes this number of rows [rows, hidden]."""
    return rows == 1 and hidden <= _LONGEST


def judge(x: torch.Tensor, product: RouterProduct, choice: RowChoice, pdl: bool) -> JudgedRow:
    """The norm of a row x [1, hidden], and the router's product with it."""
    return JudgedRow(*score(x, product, choice.experts, pdl), choice)


def score(
    x: torch.Tensor, product: RouterProduct, experts: int, pdl: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of a row x [1, hidden], and the router's logits, float32 [experts], with their bias."""
    hidden = x.shape[1]
    normed = empty_padded(1, hidden, like=x)
    logits = torch.empty(experts, dtype=torch.float32, device=x.device)
    _judge[(experts + 1,)](
        *(x, product.gain, product.weight, product.router.bias, logits, normed),
        EXPERTS=experts,
        HIDDEN=hidden,
        BLOCK=power_of_2(hidden),
        EPS=product.eps,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return normed, logits


def back_add(
    task: GroupedTask, judged: JudgedRow, residual: torch.Tensor, launch: ProductLaunch
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product back of what each expert's gate passed, by their shares, plus the residual [1, hidden].

    Returns the row and its sums of squares, float32 [parts, 128], for `skinny.SkinnyInput`.
    """
    weight, plan, tile = task.weight, plan_of(task, launch.pdl), task.tile
    assert not isinstance(weight, StoredWeight)
    out = empty_padded(1, plan.outputs, like=residual)
    sums = torch.empty(plan.tiles, MAX_ROWS, dtype=torch.float32, device=out.device)
    _back_add[(plan.tiles, judged.choice.per_row * plan.split)](
        *(task.rows[0], weight.words, blocks_of(weight, plan), weight.scales, weight.beside, task.bias),
        *(judged.logits, residual, out, sums, launch.partials, launch.tickets),
        plan,
        judged.choice,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=plan.pdl,
    )
    return out, sums


@kernel
def _judge(
    x, gain, weight, bias, logits, normed,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (experts + 1): an expert's logit; the last program has the norm."""
    expert, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside, judges = column < HIDDEN, expert < EXPERTS
    factor = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    if judges:
        at = weight + expert * HIDDEN + column
        factor *= tl.load(at, mask=inside, other=0.0).to(tl.float32)
    after_previous(PDL)
    values = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / HIDDEN + EPS)
    if judges:
        logit = tl.sum(values * factor, 0) * scale
        if bias is not None:
            logit += tl.load(bias + expert)
        tl.store(logits + expert, logit)
    else:
        tl.store(normed + column, (values * scale * factor).to(normed.dtype.element_ty), mask=inside)


@kernel
def _back_add(
    x, words, tiles, scales, beside, bias, logits, residual, out, sums, partials, tickets,
    plan: tl.constexpr, choice: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of columns, choices * split): a part of k of one expert; the last to arrive adds them up.

    Logits are there at once: what made x has waited for them before it let this kernel be launched.
    """
    PARTS: tl.constexpr = choice.per_row * plan.split
    tile, share = tl.program_id(0), tl.program_id(1)
    slot, part, first = share // plan.split, share % plan.split, tile * plan.columns
    expert, weight = choice_at(logits, slot, choice)
    if plan.pdl:
        if plan.ahead > 0:
            call_steps_ahead(words, expert, first, part, plan)
        gdc_wait()
        gdc_launch_dependents()  # not before: what the next kernel calls ahead would come before these rows
    row, column = tl.arange(0, plan.rows), first + tl.arange(0, plan.columns)
    inside, there = row < 1, column < plan.outputs
    source = tl.where(inside, slot, 0).to(tl.int64)
    made = product_of(x, tiles, scales, beside, source, inside, expert, first, part, plan)
    mine = tl.sum(tl.where(inside[None, :], made, 0.0), 1)
    if bias is not None:
        mine += tl.load(bias + expert * plan.n + column, mask=there & (part == 0), other=0.0).to(tl.float32)
    shares = partials + tile * (PARTS * plan.columns) + tl.arange(0, plan.columns)
    tl.store(shares + share * plan.columns, mine * weight)
    tl.debug_barrier()  # one thread takes the ticket, for the stores of all
    if tl.atomic_add(tickets + tile, 1, sem="acq_rel") == PARTS - 1:
        tl.store(tickets + tile, 0)
        total = tl.load(residual + column, mask=there, other=0.0).to(tl.float32) + _total(shares, PARTS, plan)
        rounded = total.to(out.dtype.element_ty)
        tl.store(out + column, rounded, mask=there)
        wide = tl.where(there, rounded.to(tl.float32), 0.0)
        tl.store(sums + tile * SUMS_WIDTH, tl.sum(wide * wide, 0))


@triton.jit
def _total(shares, PARTS: tl.constexpr, plan: tl.constexpr):
    """The sum of all parts, in order; loads past L1, which does not see the stores of other SMs."""
    total = tl.full((plan.columns,), 0.0, tl.float32)
    for other in tl.static_range(PARTS):
        total += tl.load(shares + other * plan.columns, cache_modifier=".cg")
    return total
