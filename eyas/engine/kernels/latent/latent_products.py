"""The products that each head has to itself in absorbed latent attention: into the latents, and out again.

A head's plain query times its keys' factor meets latents as they are kept; what it then has mixed of them,
times its values' factor, is its result (DeepSeek-V2, arXiv 2405.04434, section 2.1). Both kernels take any
number of rows, with one head's factor at a time; the second first adds up the parts of a context, in their
order. Of some rows a launch between them does that: every program of the second would read all parts of its
rows. `exact`: one cut for any number of rows, and no multiplication is fused with an addition.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.attention.softmax import UNSEEN
from eyas.engine.kernels.latent.latent_attend import PartialResults
from eyas.engine.kernels.latent.latent_tiles import MOST_PARTS
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.kernels.products.rope_store import rotated, store_halves
from eyas.engine.kernels.products.skinny import RotaryInput, empty_padded

_FEW = 16  # rows of a program, where there are no more (it asks for its weights first) or parts are added up
_MANY = 64
_COLUMNS = 128  # of a program
_ALONE = 2  # rows in parts: up to this number each is taken alone
_NARROW = 16  # columns of a program that takes such a row
_APART = 8  # rows in parts: up to this number a launch of its own adds them up
_PARTS = 16  # of a row that are added up at a time
_ADDED = 256  # columns of a program that does so
_PROGRAMS = 128  # fewer than that are cut into narrower ones


def absorb(
    q: torch.Tensor, factor: torch.Tensor, rotation: RotaryInput, pdl: bool = False, exact: bool = False
) -> torch.Tensor:
    """Rows q [m, heads * (plain + rotated)], strided by row at most -> [m, heads, latent + rotated].

    factor [heads, plain, latent]: of the keys. The last `rotated` elements of a head are rotated in float32,
    element i with i + rotated / 2.
    """
    (m, width), (heads, plain, latent) = q.shape, factor.shape
    rotated, rows = width // heads - plain, _FEW if m <= _FEW and not exact else _MANY
    columns = min(latent, _COLUMNS)
    out = empty_padded(m, heads, latent + rotated, like=q)
    _absorb[(heads, cdiv(m, rows), latent // columns + 1)](
        *(q, q.stride(0), factor, out, rotation.cos, rotation.sin, rotation.positions, m),
        HEADS=heads,
        PLAIN=plain,
        DEPTH=max(16, power_of_2(plain)),
        LATENT=latent,
        HALF=rotated // 2,
        ROWS=rows,
        COLUMNS=columns,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
        **_options(exact),
    )
    return out


def values(
    mixed: PartialResults | torch.Tensor,
    factor: torch.Tensor,
    out: torch.Tensor,
    pdl: bool = False,
    exact: bool = False,
) -> None:
    """Mixed latents [m, heads, latent], whole or in parts (exact: whole), times `factor` -> out
    [m, heads * value].

    factor [heads, value, latent]: of the values.
    """
    if isinstance(mixed, PartialResults) and mixed.parts.shape[1] <= _ALONE:
        return _single_values(mixed, factor, out, pdl)
    if isinstance(mixed, PartialResults) and mixed.parts.shape[1] <= _APART:
        mixed = _added(mixed, factor, pdl)
    parted = mixed if isinstance(mixed, PartialResults) else None
    source = mixed.parts[0] if isinstance(mixed, PartialResults) else mixed
    (m, heads, latent), width = source.shape, factor.shape[1]
    ahead = parted is None and m <= _FEW and not exact
    rows = _FEW if ahead or parted is not None else _MANY
    columns = max(16, min(_COLUMNS, power_of_2(width)))
    if not exact and columns > 32 and heads * cdiv(m, rows) * cdiv(width, columns) < _PROGRAMS:
        columns = 32
    _values[(heads, cdiv(m, rows), cdiv(width, columns))](
        *(source, None if parted is None else parted.lses, None if parted is None else parted.counts),
        *(factor, out, m, 1 if parted is None else parted.width),
        HEADS=heads,
        VALUE=width,
        LATENT=latent,
        DEPTH=min(latent, 64),
        ROWS=rows,
        COLUMNS=columns,
        AHEAD=ahead,
        PDL=pdl,
        num_warps=4 if parted is None else 8,
        launch_pdl=pdl,
        **_options(exact),
    )


def _added(mixed: PartialResults, like: torch.Tensor, pdl: bool) -> torch.Tensor:
    """The results over whole contexts [m, heads, latent], rounded as `like` is."""
    most, m, heads, latent = mixed.parts.shape
    out, columns = like.new_empty(m, heads, latent), min(latent, _ADDED)
    _add_up[(heads, m, latent // columns)](
        *(mixed.parts, mixed.lses, mixed.counts, out, m, mixed.width, most),
        HEADS=heads,
        LATENT=latent,
        MOST=MOST_PARTS,
        PARTS=min(power_of_2(most), _PARTS),
        COLUMNS=columns,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


def _options(exact: bool) -> dict[str, bool]:
    return {"enable_fp_fusion": False} if exact else {}


def _single_values(mixed: PartialResults, factor: torch.Tensor, out: torch.Tensor, pdl: bool) -> None:
    """Row by row: all parts of one are read at once."""
    (_, m, heads, latent), width = mixed.parts.shape, factor.shape[1]
    columns = min(_NARROW, power_of_2(width))
    _values_of_row[(heads, m, cdiv(width, columns))](
        *(mixed.parts, mixed.lses, mixed.counts, factor, out, m, mixed.width, len(mixed.parts)),
        HEADS=heads,
        VALUE=width,
        LATENT=latent,
        MOST=MOST_PARTS,
        PARTS=_PARTS,
        COLUMNS=columns,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


@kernel(do_not_specialize=["positions", "m"])
def _absorb(
    q,
    q_stride,
    factor,
    out,
    cos,
    sin,
    positions,
    m,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    DEPTH: tl.constexpr,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (heads, tiles of rows, tiles of columns and then what is rotated)."""
    head, tile = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = (row < m)[:, None]
    of_head = q + row.to(tl.int64)[:, None] * q_stride + head * (PLAIN + 2 * HALF)
    to = out + (row.to(tl.int64) * HEADS + head)[:, None] * (LATENT + 2 * HALF)
    if tile * COLUMNS < LATENT:
        depth = tl.arange(0, DEPTH)
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        inside = depth < PLAIN
        at = factor + (head * PLAIN + depth)[:, None] * LATENT + column[None, :]
        weight = tl.load(at, mask=inside[:, None], other=0.0)
        after_previous(PDL)
        x = tl.load(of_head + depth[None, :], mask=real & inside[None, :], other=0.0)
        y = tl.dot(x, weight, input_precision="ieee")
        tl.store(to + column[None, :], y.to(out.dtype.element_ty), mask=real)
    else:
        after_previous(PDL)
        half = tl.arange(0, HALF)[None, :]
        low = tl.load(of_head + PLAIN + half, mask=real, other=0.0).to(tl.float32)
        high = tl.load(of_head + PLAIN + HALF + half, mask=real, other=0.0).to(tl.float32)
        position = tl.load(positions + row, mask=row < m, other=0).to(tl.int64)
        angle = position[:, None] * HALF + half
        c, s = tl.load(cos + angle, mask=real, other=1.0), tl.load(sin + angle, mask=real, other=0.0)
        low, high = rotated(low, high, c, s)
        store_halves(to + LATENT + half, low, high, real, HALF)


@kernel(do_not_specialize=["counts", "m", "width"])
def _values(
    mixed,
    lses,
    counts,
    factor,
    out,
    m,
    width,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    LATENT: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (heads, tiles of rows, tiles of columns). AHEAD: it asks for its weights before it waits."""
    head = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    weights = factor + (head * VALUE + column).to(tl.int64)[None, :] * LATENT
    place = row.to(tl.int64) * HEADS + head
    depth = tl.arange(0, LATENT)
    if AHEAD:
        weight = tl.load(weights + depth[:, None], mask=column[None, :] < VALUE, other=0.0)
        after_previous(PDL)
        x = tl.load(mixed + place[:, None] * LATENT + depth[None, :], mask=row[:, None] < m, other=0.0)
        y = tl.dot(x, weight, input_precision="ieee")
    elif lses is not None:
        after_previous(PDL)
        x = _added_up(mixed, lses, counts, row, place, m, width, HEADS, ROWS, LATENT)
        weight = tl.load(weights + depth[:, None], mask=column[None, :] < VALUE, other=0.0)
        y = tl.dot(x.to(weight.dtype), weight, input_precision="ieee")
    else:
        after_previous(PDL)
        y = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for first in range(0, LATENT, DEPTH):
            some = first + tl.arange(0, DEPTH)
            x_at = mixed + place[:, None] * LATENT + some[None, :]
            x = tl.load(x_at, mask=row[:, None] < m, other=0.0)
            weight = tl.load(weights + some[:, None], mask=column[None, :] < VALUE, other=0.0)
            y = tl.dot(x, weight, y, input_precision="ieee")
    at = out + place[:, None] * VALUE + column[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=(row[:, None] < m) & (column[None, :] < VALUE))


@kernel(do_not_specialize=["counts", "m", "width", "most"])
def _add_up(
    parts,
    lses,
    counts,
    out,
    m,
    width,
    most,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    MOST: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (heads, m, tiles of latents)."""
    head, row = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    after_previous(PDL)
    place, size = row.to(tl.int64) * HEADS + head, m.to(tl.int64) * HEADS
    mixed = _added_at_once(
        parts + column, lses, counts + row // width, place, size, most, LATENT, MOST, PARTS, COLUMNS
    )
    tl.store(out + place * LATENT + column, mixed.to(out.dtype.element_ty))


@kernel(do_not_specialize=["counts", "m", "width", "most"])
def _values_of_row(
    parts,
    lses,
    counts,
    factor,
    out,
    m,
    width,
    most,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    LATENT: tl.constexpr,
    MOST: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (heads, m, tiles of columns)."""
    head, row = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, LATENT)
    weight_at = factor + (head * VALUE + column)[:, None] * LATENT + depth[None, :]
    weight = tl.load(weight_at, mask=(column < VALUE)[:, None], other=0.0)
    after_previous(PDL)
    place, size = row.to(tl.int64) * HEADS + head, m.to(tl.int64) * HEADS
    mixed = _added_at_once(
        parts + depth, lses, counts + row // width, place, size, most, LATENT, MOST, PARTS, LATENT
    )
    mixed = mixed.to(weight.dtype).to(tl.float32)
    y = tl.sum(weight.to(tl.float32) * mixed[None, :], 1)
    tl.store(out + place * VALUE + column, y.to(out.dtype.element_ty), mask=column < VALUE)


@triton.jit
def _added_at_once(
    parts, lses, count_at, place, size, most,
    LATENT: tl.constexpr, MOST: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The result of the row of a head at `place` over its context, float32 [COLUMNS]; `parts`: addresses of
    these columns in part 0; parts are `size` rows apart.

    The first are asked for before it is known whether they are there: what is not may be anything, and is
    left out.
    """
    each, part = tl.arange(0, MOST), tl.arange(0, PARTS)
    at = place + part * size
    x = tl.load(parts[None, :] + at[:, None] * LATENT, mask=part[:, None] < most, other=0.0)
    own = tl.load(lses + at, mask=part < most, other=UNSEEN)
    lse = tl.load(lses + place + each * size, mask=each < most, other=UNSEEN)
    count = tl.load(count_at)
    lse = tl.where(each < count, lse, UNSEEN)
    peak = tl.max(lse)
    total = tl.sum(tl.where(each < count, tl.exp2(lse - peak), 0.0))
    acc = tl.sum(tl.where(part[:, None] < count, x * tl.exp2(own - peak)[:, None], 0.0), 0)
    for first in range(PARTS, count, PARTS):
        part = first + tl.arange(0, PARTS)
        at = place + part * size
        share = tl.exp2(tl.load(lses + at, mask=part < count, other=UNSEEN) - peak)
        x = tl.load(parts[None, :] + at[:, None] * LATENT, mask=(part < count)[:, None], other=0.0)
        acc += tl.sum(x * tl.where(part < count, share, 0.0)[:, None], 0)
    return acc / tl.maximum(total, 1.0e-30)


@triton.jit
def _added_up(
    parts, lses, counts, row, place, m, width, HEADS: tl.constexpr, ROWS: tl.constexpr, LATENT: tl.constexpr
):  # fmt: skip
    """The results over a context of `row` [ROWS], float32 [ROWS, LATENT], from the first part to the last."""
    count = tl.load(counts + row // width, mask=row < m, other=0)
    peak = tl.full((ROWS,), UNSEEN, tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    acc = tl.full((ROWS, LATENT), 0.0, tl.float32)
    column = tl.arange(0, LATENT)[None, :]
    size = m.to(tl.int64) * HEADS
    for part in tl.range(0, tl.max(count), num_stages=3):
        there = part < count
        at = place + part * size
        lse = tl.load(lses + at, mask=there, other=UNSEEN)
        x = tl.load(parts + at[:, None] * LATENT + column, mask=there[:, None], other=0.0)
        new_peak = tl.maximum(peak, lse)
        weight, rescale = tl.exp2(lse - new_peak), tl.exp2(peak - new_peak)
        weight = tl.where(there, weight, 0.0)
        total = total * rescale + weight
        acc = acc * rescale[:, None] + x * weight[:, None]
        peak = new_peak
    return acc / tl.maximum(total, 1.0e-30)[:, None]
