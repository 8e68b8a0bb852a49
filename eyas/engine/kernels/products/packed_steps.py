"""A step of a product with packed numbers, by the format: what is read beside words, and what is added up.

`plan` is a `ProductPlan`. Whole numbers have scales behind the product of a group, in float32, or (exact) in
the numbers themselves; numbers of floating point have them in the numbers, which is exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eyas.engine.kernels.products import fp4, int4, int8


@triton.jit
def scales_of(scales, beside, column, at, plan: tl.constexpr):
    """What belongs to the rows `column`, by `by_warps`, in the step of k that begins there, or the steps of
    all warps: the scales of each group, with its zero points (0 where there are none); of numbers of floating
    point a word of scales.
    """
    STEP: tl.constexpr = plan.step
    SCALED: tl.constexpr = plan.scaled
    first = tl.program_id(1) * plan.chunk
    made = ()
    if plan.form == "fp4":
        there = column * 0 + at < plan.k
        word = tl.load(scales + at // plan.step * plan.n + column, mask=there, other=0)
        made = (word,)  # type: ignore[assignment]
    else:
        for begin in tl.static_range(0, STEP, SCALED):
            group = (at + begin) // plan.scaled
            if plan.shares_k:
                group = (at + begin + tl.arange(0, plan.warps)[:, None] * STEP) // plan.scaled
            place, there = group * plan.n + column, column * 0 + group * plan.scaled < plan.k
            if plan.exact:
                there &= (at + begin >= first) & (at + begin < first + plan.chunk)
            scale = tl.load(scales + place, mask=there, other=0.0)
            made = made + (_in_columns(scale, plan),)  # type: ignore[assignment]
            if beside is None:
                made = made + (0,)  # type: ignore[assignment]
            else:
                zero = tl.load(beside + place, mask=there, other=0.0)
                made = made + (_in_columns(zero, plan),)  # type: ignore[assignment]
    return made


@triton.jit
def _in_columns(numbers, plan: tl.constexpr):
    """What was loaded by `by_warps`, as the product has it: [columns], or of each warp where they share k."""
    if plan.shares_k:
        made = numbers
    else:
        made = tl.reshape(numbers, (plan.columns,))
    return made


@triton.jit
def first_sums(plan: tl.constexpr):
    """Zeros, [columns, rows]; where warps share k one for each."""
    if plan.shares_k:
        sums = tl.full((plan.warps, plan.columns, plan.rows), 0.0, tl.float32)
    else:
        sums = tl.full((plan.columns, plan.rows), 0.0, tl.float32)
    return sums


@triton.jit
def with_step(acc, x, words, of_step, beside, at, plan: tl.constexpr):
    """`acc` [columns, rows] with the products of words [columns, unit] and the rows' columns from `at` on."""
    if plan.form == "fp4":
        numbers = fp4.parts_of(words, of_step[0], 0, 4, x.dtype)
        acc = tl.dot(numbers, x.load([0, at]).T, acc, input_precision="ieee")
    elif plan.few:
        acc = _with_few(acc, x.load([0, at]), words, of_step, beside, plan)
    else:
        GROUPED: tl.constexpr = plan.scaled // plan.unit
        GROUPS: tl.constexpr = plan.parts // GROUPED
        for group in tl.static_range(GROUPS):
            rows, scale = x.load([0, at + group * plan.scaled]).T, of_step[2 * group]
            if plan.form == "int8":
                numbers = int8.numbers_of(words, None if beside is None else of_step[1], x.dtype)
            else:
                zero = int4.eights(scale, x.dtype) if beside is None else of_step[2 * group + 1]
                inside = scale if plan.exact else None
                numbers = int4.parts_of(words, zero, inside, group * GROUPED, GROUPED)
            if plan.exact:
                acc = tl.dot(numbers, rows, acc, input_precision="ieee")
            else:
                made = tl.dot(numbers, rows, input_precision="ieee")
                acc += made * scale.to(tl.float32)[:, None]
    return acc


@triton.jit
def _with_few(acc, rows, words, of_step, beside, plan: tl.constexpr):
    """The same with rows [rows, step], all at once: each part of them is an operand, and no number goes to
    another thread. Where warps share k there are rows and words of a step for each, and a product of each.
    """
    GROUPED: tl.constexpr = plan.scaled // plan.unit
    GROUPS: tl.constexpr = plan.parts // GROUPED
    if plan.shares_k:
        words = tl.permute(tl.reshape(words, (plan.columns, plan.warps, plan.unit)), (1, 0, 2))
        rows = tl.permute(tl.reshape(rows, (plan.rows, plan.warps, plan.step)), (1, 0, 2))
    parts = _parted(rows, plan.parts)
    for group in tl.static_range(GROUPS):
        scale, made = of_step[2 * group], tl.zeros_like(acc)
        zero = int4.eights(scale, rows.dtype) if beside is None else of_step[2 * group + 1]
        for part in tl.static_range(group * GROUPED, (group + 1) * GROUPED):
            numbers = int4.part_of(words, zero, part)
            made = tl.dot(numbers, _turned(parts[part]), made, input_precision="ieee")
        acc += made * tl.expand_dims(scale.to(tl.float32), -1)
    return acc


@triton.jit
def _turned(rows):
    """rows [.., rows, columns] -> [.., columns, rows]."""
    if len(rows.shape) == 3:
        turned = tl.permute(rows, (0, 2, 1))
    else:
        turned = rows.T
    return turned


@triton.jit
def _parted(rows, count: tl.constexpr):
    """The columns [.., columns] of rows in as many equal parts, which stay in their threads."""
    if count == 1:
        parts = (rows,)
    else:
        HALF: tl.constexpr = rows.shape[-1] // 2
        if len(rows.shape) == 3:
            pairs = tl.permute(tl.reshape(rows, (rows.shape[0], rows.shape[1], 2, HALF)), (0, 1, 3, 2))
        else:
            pairs = tl.permute(tl.reshape(rows, (rows.shape[0], 2, HALF)), (0, 2, 1))
        low, high = tl.split(pairs)
        parts = _parted(low, count // 2) + _parted(high, count // 2)
    return parts


@triton.jit
def by_warps(plan: tl.constexpr):
    """Numbers of a tile's rows as the warps of a product of few have them, [times, warps, 16]: what is loaded
    by them needs no move between warps; where warps share k [1, columns]; of others [columns].
    """
    TIMES: tl.constexpr = plan.columns // (16 * plan.warps)
    if plan.shares_k:
        numbers = tl.arange(0, plan.columns)[None, :]
    elif not plan.few or TIMES == 0:
        numbers = tl.arange(0, plan.columns)
    else:
        time, warp = tl.arange(0, TIMES)[:, None, None], tl.arange(0, plan.warps)[None, :, None]
        numbers = (time * plan.warps + warp) * 16 + tl.arange(0, 16)[None, None, :]
    return numbers


@triton.jit
def finished(acc, beside, column, plan: tl.constexpr):
    """A program's sums [columns, rows], times what a format has for each row of the matrix."""
    if plan.shares_k:
        acc = tl.sum(acc, 0)
    if plan.form == "fp4" and beside is not None:
        acc *= tl.load(beside + column)[:, None]
    return acc
