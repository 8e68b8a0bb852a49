"""Gates around the rule: those of rows, and the norm and the gate of what heads read.

One program per row, and every sum stays within one head: a row's bits depend on that row alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton.language as tl

from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.kernels.products.halving import halving_sum
from eyas.engine.kernels.products.skinny import empty_padded
from eyas.engine.states.shape import DeltaShape, SpaceShape

_ELEMENTS = 2048  # of a program of `gated_norm`


def rule_gates(
    numbers: Sequence[torch.Tensor],
    step_bias: torch.Tensor,
    rate: torch.Tensor,
    shape: DeltaShape,
    pdl: bool = False,
) -> torch.Tensor:
    """float32 [m, 2 heads]: steps times rate, where a step is softplus(its number + step_bias), within the
    shape's limits if it has any; then the sigmoid of the number of a correction times the shape's reach, or,
    where nothing is corrected, the step.

    numbers: those of corrections, if there are, and those of steps, [m, heads], rows of any stride, the same
    for both; step_bias and rate float32 [heads].
    """
    steps, shares = numbers[-1], numbers[0]
    m, heads = steps.shape
    out = torch.empty(m, 2 * heads, device=steps.device)
    limits = shape.limits if isinstance(shape, SpaceShape) else (0.0, math.inf)
    _gates[(m,)](
        *(steps, shares, steps.stride(0), step_bias, rate, *limits, shape.reach, out),
        HEADS=heads,
        BLOCK=power_of_2(heads),
        CORRECTS=shape.corrects,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=1,
    )
    return out


def gated_norm(
    made: torch.Tensor, gate: torch.Tensor, gain: torch.Tensor, eps: float, pdl: bool = False
) -> torch.Tensor:
    """Heads made [m, heads * size] over their root mean square, times gain [size], rounded; then times
    silu(gate) [m, heads * size], rows of any stride.
    """
    (m, width), size = made.shape, gain.shape[0]
    out = empty_padded(m, width, like=made)
    heads = min(power_of_2(width // size), max(1, _ELEMENTS // size))
    sizes = {"HEADS": width // size, "SIZE": size, "TILE": heads, "PDL": pdl, "launch_pdl": pdl}
    grid = (m, cdiv(width // size, heads))
    _gated_norm[grid](
        made, gate, gate.stride(0), gain, out, eps, **sizes, num_warps=4, enable_fp_fusion=False
    )
    return out


def gated_groups(
    made: torch.Tensor,
    gate: torch.Tensor,
    gain: torch.Tensor | None,
    shape: SpaceShape,
    eps: float,
    pdl: bool = False,
) -> torch.Tensor:
    """made [m, values] times silu(gate) [m, values], rows of any stride, and the root mean square norm of
    equal groups of it, times gain [values], if there is one; in the order that `shape` says.
    """
    m, width = made.shape
    out, groups = empty_padded(m, width, like=made), shape.norm_groups if gain is not None else 1
    sizes = {"WIDTH": width // groups, "BLOCK": power_of_2(width // groups), "FIRST": shape.norm_first}
    _gated_groups[(m, groups)](
        *(made, gate, gate.stride(0), made if gain is None else gain, out, eps),
        **(sizes | {"NORM": gain is not None, "PDL": pdl, "launch_pdl": pdl}),
        num_warps=8 if sizes["BLOCK"] > _ELEMENTS else 4,
        enable_fp_fusion=False,
    )
    return out


@kernel
def _gates(
    steps, shares, stride, step_bias, rate, low, high, reach, out,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, CORRECTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The logarithm is taken in float64: of a small step float32 would have nothing."""
    after_previous(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = head < HEADS
    step = tl.load(steps + row * stride + head, mask=there, other=0.0).to(tl.float32)
    step += tl.load(step_bias + head, mask=there, other=0.0)
    behind = tl.log(1.0 + tl.exp(-tl.abs(step)).to(tl.float64)).to(tl.float32)
    step = tl.minimum(tl.maximum(tl.maximum(step, 0.0) + behind, low), high)
    decay = step * tl.load(rate + head, mask=there, other=0.0)
    if CORRECTS:
        share = tl.load(shares + row * stride + head, mask=there, other=0.0).to(tl.float32)
        step = reach / (1.0 + tl.exp(-share))
    tl.store(out + row * (2 * HEADS) + head, decay, mask=there)
    tl.store(out + row * (2 * HEADS) + HEADS + head, step, mask=there)


@kernel
def _gated_groups(
    made, gate, stride, gain, out, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (m, groups)."""
    after_previous(PDL)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = group * WIDTH + tl.arange(0, BLOCK)
    there = tl.arange(0, BLOCK) < WIDTH
    at = row * (tl.num_programs(1) * WIDTH) + column
    x = tl.load(made + at, mask=there, other=0.0).to(tl.float32)
    z = tl.load(gate + row * stride + column, mask=there, other=0.0).to(tl.float32)
    z = z / (1.0 + tl.exp(-z))
    if not FIRST:
        x *= z
    if NORM:
        square = halving_sum(tl.reshape(x * x, (1, BLOCK)))
        x = x / tl.sqrt(tl.sum(square, 0) / WIDTH + eps)
        x = x.to(out.dtype.element_ty).to(tl.float32) * tl.load(gain + column, mask=there).to(tl.float32)
        x = x.to(out.dtype.element_ty).to(tl.float32)
    if FIRST:
        x *= z
    tl.store(out + at, x.to(out.dtype.element_ty), mask=there)


@kernel
def _gated_norm(
    made, gate, stride, gain, out, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None]
    column = tl.arange(0, SIZE)[None, :]
    there = (head < HEADS) & (column >= 0)
    at = head * SIZE + column
    x = tl.load(made + row * (HEADS * SIZE) + at, mask=there, other=0.0).to(tl.float32)
    rms = tl.sqrt(halving_sum(x * x) / SIZE + eps)[:, None]
    x = x / rms * tl.load(gain + column).to(tl.float32)
    z = tl.load(gate + row * stride + at, mask=there, other=0.0).to(tl.float32)
    x = x.to(out.dtype.element_ty).to(tl.float32) * z / (1.0 + tl.exp(-z))
    tl.store(out + row * (HEADS * SIZE) + at, x.to(out.dtype.element_ty), mask=there)
