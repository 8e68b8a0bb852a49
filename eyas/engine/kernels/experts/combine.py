"""Adds up the results of a row's experts by weight, in the order of the row's choice, without atomics.

`exact`: a row has the same bits on either way, and no multiplication is fused with an addition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.kernels.products.halving import halving_sum
from eyas.engine.kernels.products.skinny import MAX_ROWS, empty_padded, sum_group
from eyas.engine.kernels.products.skinny_kernels import SUMS_WIDTH

_COLUMNS = 512  # of a row, that a program adds up


@dataclass(frozen=True)
class BesideRows:
    """The rows [m, hidden] that a feed-forward beside the experts makes; with `logits` float32 [m, any],
    times the sigmoid of the first of each row, both rounded.
    """

    made: torch.Tensor
    logits: torch.Tensor | None = None

    @property
    def whole(self) -> torch.Tensor:
        """The rows as they are added, in plain torch."""
        if self.logits is None:
            return self.made
        return self.made * self.logits[:, :1].sigmoid().to(self.made.dtype)


def combine(
    made: torch.Tensor,
    weights: torch.Tensor,
    beside: BesideRows | None = None,
    pdl: bool = False,
    exact: bool = False,
) -> torch.Tensor:
    """made [m * per_row, hidden], weights float32 [m, per_row] -> [m, hidden]."""
    return _launch((made, weights, beside, None), None, None, pdl, exact)


def combine_local(
    made: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, pdl: bool = False
) -> torch.Tensor:
    """Combines as `combine`, but only choices with a local expert: experts int32 [m, per_row], else -1."""
    return _launch((made, weights, None, experts), None, None, pdl, exact=False)


def combine_add(
    made: torch.Tensor,
    weights: torch.Tensor,
    beside: BesideRows | None,
    residual: torch.Tensor,
    pdl: bool = False,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combines as `combine` and adds to `residual` [m, hidden], m <= 128, rounded once (exact: before it as
    well).

    Returns the rows and their sums of squares, float32 [parts, 128], for `skinny.SkinnyInput`.
    """
    width = residual.shape[1]
    parts = width // sum_group(width) if exact else cdiv(width, _COLUMNS)
    sums = torch.empty(parts, MAX_ROWS, dtype=torch.float32, device=made.device)
    return _launch((made, weights, beside, None), residual, sums, pdl, exact), sums


def _launch(
    parts: tuple[torch.Tensor, torch.Tensor, BesideRows | None, torch.Tensor | None],
    residual: torch.Tensor | None,
    sums: torch.Tensor | None,
    pdl: bool,
    exact: bool,
) -> torch.Tensor:
    made, weights, beside, experts = parts
    shared, logits = (None, None) if beside is None else (beside.made, beside.logits)
    (m, per_row), width = weights.shape, made.shape[1]
    out = empty_padded(m, width, like=made)
    stride = 0 if logits is None else logits.stride(0)
    sizes = {"WIDTH": width, "PER_ROW": per_row, "STRIDE": stride, "COLUMNS": _COLUMNS, "PDL": pdl}
    options = {"GROUP": sum_group(width), "enable_fp_fusion": False} if exact else {"GROUP": 0}
    grid, options = (m, cdiv(width, _COLUMNS)), options | {"num_warps": 4, "launch_pdl": pdl}
    _combine[grid](made, weights, shared, logits, experts, residual, out, sums, **sizes, **options)
    return out


@kernel
def _combine(
    made, weights, shared, logits, experts, residual, out, sums,
    WIDTH: tl.constexpr, PER_ROW: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Some columns of a row; GROUP: of each sum of squares, 0 of all of them in no order of its own. STRIDE:
    of rows of logits.
    """
    after_previous(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in tl.static_range(PER_ROW):
        choice = row * PER_ROW + k
        there = inside
        if experts is not None:
            there = inside & (tl.load(experts + choice) >= 0)
        values = tl.load(made + choice * WIDTH + column, mask=there, other=0.0).to(tl.float32)
        total += tl.load(weights + choice) * values
    at = row * WIDTH + column
    if shared is not None:
        more = tl.load(shared + at, mask=inside, other=0.0)
        if logits is not None:
            share = (1.0 / (1.0 + tl.exp(-tl.load(logits + row * STRIDE)))).to(more.dtype)
            more = (more.to(tl.float32) * share.to(tl.float32)).to(more.dtype)
        total += more.to(tl.float32)
    if residual is not None:
        if GROUP > 0:
            total = total.to(out.dtype.element_ty).to(tl.float32)  # as many rows are, which are added later
        total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=inside)
    if sums is not None:
        wide = rounded.to(tl.float32)
        if GROUP == 0:
            tl.store(sums + part * SUMS_WIDTH + row, tl.sum(wide * wide, 0))
        else:
            GROUPS: tl.constexpr = COLUMNS // GROUP
            group = part * GROUPS + tl.arange(0, GROUPS)
            squares = halving_sum(tl.reshape(wide * wide, (GROUPS, GROUP)))
            tl.store(sums + group * SUMS_WIDTH + row, squares, mask=group < WIDTH // GROUP)
