"""One row's way back from its experts: products, their sum by weight, the residual, a norm and rounding.

As `combine_rounded` has it for some rows, behind products whose weights wait in registers (`single`). Each
program has one expert's share of 128 columns; the last of these columns adds the shares up, in order, and the
residual, and rounds the columns times the gain as they are. What meets weights in FP8 is rounded by the
programs themselves. It is no `exact` arithmetic.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eyas.engine.kernels.experts.combine_rounded import can_round
from eyas.engine.kernels.experts.route import ChosenExperts
from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import power_of_2
from eyas.engine.kernels.products.blocks import SIDE, Fp8Rows, RowSquares, StoredWeight, quantised, room_for
from eyas.engine.kernels.products.rows import NormInput
from eyas.engine.kernels.products.single import row_of, spread
from eyas.engine.kernels.products.skinny import ProductLaunch, empty_padded

_LONGEST = 512  # numbers of a weight row: 128 of them wait in a program's registers


def can_take(weight: StoredWeight, norm: NormInput) -> bool:
    """Whether `back_rounded` takes experts' weight [experts, hidden, width], and what reads the sum."""
    hidden, width = weight.shape[-2:]
    blocks = weight.rounding is not None and weight.rounding.rows == "block"
    return blocks and width <= _LONGEST and can_round(hidden, norm)


def back_rounded(
    inner: torch.Tensor,
    weight: StoredWeight,
    chosen: ChosenExperts,
    residual: torch.Tensor,
    norm: NormInput,
    launch: ProductLaunch,
) -> tuple[torch.Tensor, Fp8Rows]:
    """inner [choices, width], residual [1, hidden] -> what one row's experts make of it, added up by weight
    and to the residual, rounded once; and its norm in FP8.

    `chosen` is read before the wait for `inner`, as by `single.back`.
    """
    (count, width), hidden = inner.shape, weight.shape[-2]
    assert norm.rounding is not None and weight.rounding is not None
    out, rounded = empty_padded(1, hidden, like=inner), room_for(residual, norm.rounding)
    blocks = hidden // SIDE
    squares = torch.empty(1, blocks, dtype=torch.float32, device=inner.device)
    _back_rounded[(blocks, count)](
        *(inner, weight.stored, weight.scales, chosen.experts, chosen.weights, residual, norm.gain),
        *(out, rounded.stored, rounded.scales, squares, launch.partials, launch.tickets),
        N=hidden,
        K=width,
        BLOCK=max(power_of_2(width), SIDE),
        COUNT=count,
        SLOTS=power_of_2(count),
        ROUNDED="powers" if weight.rounding.powers else "block",
        POWERS=norm.rounding.powers,
        PDL=launch.pdl,
        num_warps=4,
        launch_pdl=launch.pdl,
    )
    return out, replace(rounded, squares=RowSquares(squares, norm.eps))


@kernel
def _back_rounded(
    inner, weights, scales, chosen, shares, residual, gain, out, stored, row_scales, squares, partials,
    tickets,
    N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, SLOTS: tl.constexpr,
    ROUNDED: tl.constexpr, POWERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of 128 columns, choices)."""
    BLOCKS: tl.constexpr = N // 128
    WIDTH: tl.constexpr = (K + 127) // 128
    block, choice = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    expert = tl.load(chosen + choice, cache_modifier=".cg")  # past L1: others wrote it just now
    taken, expert = expert >= 0, tl.maximum(expert, 0)
    own, column = block * 128 + tl.arange(0, 128), tl.arange(0, BLOCK)
    at = weights + (expert * N + own).to(tl.int64)[:, None] * K + column[None, :]
    weight = tl.load(at, mask=(column < K)[None, :] & taken, other=0.0)
    share = tl.where(taken, tl.load(shares + choice, cache_modifier=".cg"), 0.0)
    factor = share * spread(scales + (expert * BLOCKS + block) * WIDTH, K, BLOCK)
    gains = tl.load(gain + own).to(tl.float32)
    if PDL:
        gdc_wait()
    values = row_of(inner, None, choice, K, BLOCK, False, ROUNDED) * factor
    values = tl.where(taken, values, 0.0)  # what none chose may be anything
    made = tl.sum(weight.to(tl.float32) * values[None, :], 1)
    tl.store(partials + (block * COUNT + choice) * 128 + tl.arange(0, 128), made)
    tl.debug_barrier()  # one thread takes the ticket, for the stores of all
    if tl.atomic_add(tickets + block, 1, sem="acq_rel") == COUNT - 1:
        tl.store(tickets + block, 0)
        _finish(
            residual, gains, out, stored, row_scales, squares, partials, block, own, COUNT, SLOTS, POWERS
        )  # fmt: skip


@triton.jit
def _finish(
    residual, gains, out, stored, row_scales, squares, partials, block, own, COUNT: tl.constexpr,
    SLOTS: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    """128 columns of the row: their sum, the sum of their squares, and what they are rounded to."""
    slot = tl.arange(0, SLOTS)[:, None]
    at = partials + (block * COUNT + slot) * 128 + tl.arange(0, 128)[None, :]
    total = tl.sum(tl.load(at, mask=slot < COUNT, other=0.0, cache_modifier=".cg"), 0)
    whole = (total + tl.load(residual + own).to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + own, whole)
    wide = whole.to(tl.float32)
    tl.store(squares + block, tl.sum(wide * wide, 0))
    gained = (wide * gains).to(out.dtype.element_ty)
    rounded, scale = quantised(gained[None, :], POWERS)
    tl.store(stored + own[None, :], rounded)
    tl.store(row_scales + block + tl.arange(0, 1), scale)
