"""The small kernels between the products of a wide forward: one row per program, or a few of its heads.

Sums are taken in float32; a result is rounded once, to the dtype of its input. Tensors are contiguous, their
rows a multiple of 16 bytes. `pdl`: the kernel may be launched before the one before it has ended, and waits
for it. `exact`: sums of squares are taken in the one order of `halving`, and what is left for
`skinny.SkinnyInput` are those of its groups of columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.kernels.products.activation import steepness
from eyas.engine.kernels.products.blocks import (
    SIDE,
    Fp8Rows,
    NormedRows,
    mode_of,
    quantised,
    room_for,
    rounded_row,
    store_scales,
)
from eyas.engine.kernels.products.halving import halving_sum
from eyas.engine.kernels.products.rope_store import (
    pool_row,
    pool_scale,
    rotated,
    store_halves,
    store_scaled,
)
from eyas.engine.kernels.products.skinny import (
    MAX_ROWS,
    HeadNorms,
    KvRows,
    RotaryInput,
    empty_padded,
    sum_group,
)
from eyas.engine.kernels.products.skinny_kernels import SUMS_WIDTH

_PRODUCTS = 1024  # elements of a row that a program of `act_mul` makes
_NONE = (None, None, None, 0, 0.0)  # where `_norm` rounds nothing
_HEADS = 8  # heads of a row that a program of `rope_write` rotates, at most


@dataclass(frozen=True)
class NormInput:
    """The parameters of a norm: gain [hidden], if there is one, and how products in FP8 round what
    they read. `plain`: whether something reads the rows as they are.
    """

    eps: float
    gain: torch.Tensor | None = None
    rounding: RowRounding | None = None
    plain: bool = True


def norm(
    x: torch.Tensor, eps: float, gain: torch.Tensor | None = None, pdl: bool = False, exact: bool = False
) -> torch.Tensor:
    """Rows x [m, hidden] over their root mean square, times gain [hidden] if there is one."""
    out = empty_padded(*x.shape, like=x)
    _norm[(x.shape[0],)](x, None, None, gain, out, None, *_NONE, eps, **_row(x.shape[1], pdl, exact))
    return out


def normed(x: torch.Tensor, how: NormInput, pdl: bool = False, exact: bool = False) -> NormedRows:
    """`norm` of rows x [m, hidden], for those that read them rounded as well."""
    return _normed((x, None, None), how, _row(x.shape[1], pdl, exact))


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    how: NormInput,
    post: torch.Tensor | None = None,
    pdl: bool = False,
) -> NormedRows:
    """residual += x, in place and rounded; then the norm of the rounded residual. All [m, hidden].

    With `post` [hidden], the norm of x with that gain, rounded, is added instead of x.
    """
    return _normed((x, residual, post), how, _row(x.shape[1], pdl))


def _normed(
    rows: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None], how: NormInput, row: dict[str, Any]
) -> NormedRows:
    """The norm of x, added to the residual if there is one, with a gain if there is one."""
    x, rounding = rows[0], how.rounding
    out = empty_padded(*x.shape, like=x) if how.plain or rounding is None else None
    if rounding is None:
        _norm[(x.shape[0],)](*rows, how.gain, out, None, *_NONE, how.eps, **row)
        return NormedRows(out)
    rounded = room_for(x, rounding, turned=True)
    into = (*rounded.places, rounding.scale)
    row |= {"BLOCK": max(row["BLOCK"], SIDE), "MODE": mode_of(rounding)}
    _norm[(x.shape[0],)](*rows, how.gain, out, None, *into, how.eps, **row)
    return NormedRows(out, rounded, rounding)


def add_normed(
    x: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    eps: float,
    pdl: bool = False,
    exact: bool = False,
) -> torch.Tensor:
    """residual += the norm of x with gain `post` [hidden], rounded; in place and rounded. Both [m, hidden].

    Returns sums of squares of the residual rows (m <= 128), float32 [parts, 128]: `skinny.SkinnyInput`.
    """
    sums = _room_for_sums(x, exact)
    row = _row(x.shape[1], pdl, exact)
    _norm[(x.shape[0],)](x, residual, post, None, None, sums, *_NONE, eps, **row)
    return sums


def gather_rows(source: torch.Tensor, index: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    """source [n, width], index int32 or int64 [m] -> [m, width]."""
    out = empty_padded(index.shape[0], source.shape[1], like=source)
    _gather[(index.shape[0],)](source, index, out, None, SCALE=1.0, **_row(source.shape[1], pdl))
    return out


def put_rows(x: torch.Tensor, out: torch.Tensor, place: int, pdl: bool = False) -> None:
    """Rows x [m, hidden] to out [m, places, hidden], at `place` of each."""
    rows, width = x.shape
    sizes = {"WIDTH": width, "BLOCK": power_of_2(width), "PDL": pdl, "launch_pdl": pdl}
    _put[(rows,)](x, out, out.shape[1], place, **sizes, num_warps=4)


def embed(
    tokens: torch.Tensor,
    table: torch.Tensor,
    sums: bool = False,
    scale: float = 1.0,
    pdl: bool = False,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """tokens int32 [m], table [vocab, hidden] -> rows [m, hidden], times `scale` in the table's precision.

    With `sums` (m <= 128) also the rows' sums of squares as `skinny.SkinnyInput` takes them, float32 [parts,
    128].
    """
    scale = torch.tensor(scale, dtype=table.dtype).item()
    out = empty_padded(tokens.shape[0], table.shape[1], like=table)
    squares = _room_for_sums(table, exact) if sums else None
    _gather[(tokens.shape[0],)](table, tokens, out, squares, SCALE=scale, **_row(table.shape[1], pdl, exact))
    return out, squares


def act_mul(gate_up: torch.Tensor, gelu: bool = False, pdl: bool = False) -> torch.Tensor:
    """Rows [gate ; up] [m, 2 * inner] -> silu(gate) * up [m, inner], or with GELU in its tanh form."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _start_act_mul(gate_up, (out, None, None, 0), "", gelu, pdl)
    return out


def act_mul_rounded(
    gate_up: torch.Tensor, rounding: RowRounding, gelu: bool = False, pdl: bool = False
) -> Fp8Rows:
    """Computes `act_mul`, rounded by blocks."""
    out = room_for(gate_up[:, : gate_up.shape[1] // 2], rounding, turned=True)
    _start_act_mul(gate_up, out.places, mode_of(rounding), gelu, pdl)
    return out


def _start_act_mul(
    gate_up: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, int],
    mode: str,
    gelu: bool,
    pdl: bool,
) -> None:
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    sizes = {"INNER": inner, "BLOCK": _PRODUCTS, "GELU": gelu, "MODE": mode, "PDL": pdl}
    _act_mul[(rows, cdiv(inner, _PRODUCTS))](gate_up, *out, **sizes, num_warps=4, launch_pdl=pdl)


@dataclass(frozen=True)
class HeadLayout:
    """The division of a row of q, k and v into heads, and the norms before they are rotated; before those a
    bias [(q + 2 kv) * dim], if the product that made the row has left it out.
    """

    q: int
    kv: int
    dim: int
    norms: HeadNorms | None = None
    bias: torch.Tensor | None = None


def rope_write(
    qkv: torch.Tensor,
    heads: HeadLayout,
    q: torch.Tensor,
    rotation: RotaryInput,
    kv: KvRows,
    pdl: bool = False,
) -> None:
    """Rows qkv [m, (heads.q + 2 heads.kv) * dim], of any stride: rotated q goes to q [m, heads.q, dim], k
    and v to the pool.

    k is rotated too, in float32, element i of a head with i + dim / 2. A row at -1 in `kv` writes no k and v.
    """
    block = min(_HEADS, power_of_2(heads.kv))
    programs = cdiv(heads.q, block) + 2 * cdiv(heads.kv, block)
    norms = heads.norms
    gains = (None, None, 0.0) if norms is None else (*norms.gains, norms.eps)
    _rope_write[(qkv.shape[0], programs)](
        *(qkv, q, kv.layer, kv.layer.stride(0), kv.rows),
        *(rotation.cos, rotation.sin, rotation.positions, heads.bias, *gains),
        STRIDE=qkv.stride(0),
        HEADS=heads.q,
        KV_HEADS=heads.kv,
        DIM=heads.dim,
        SHARE=kv.layer.stride(3),
        PAGE=kv.layer.shape[2],
        BLOCK=block,
        HALF=power_of_2(heads.dim // 2),
        PDL=pdl,
        num_warps=2,
        launch_pdl=pdl,
    )


def gate_rows(x: torch.Tensor, gates: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    """x [m, n] times the sigmoid of gates [m, n], rows of any stride; in x's place, and rounded once."""
    rows, width = x.shape
    sizes = {"WIDTH": width, "BLOCK": _PRODUCTS, "PDL": pdl, "launch_pdl": pdl}
    _gate_rows[(rows, cdiv(width, _PRODUCTS))](
        x, gates, gates.stride(0), **sizes, num_warps=4, enable_fp_fusion=False
    )
    return x


def _room_for_sums(rows: torch.Tensor, exact: bool) -> torch.Tensor:
    """Allocates the sums of squares of at most 128 rows as wide as these, float32 [parts, 128]."""
    parts = rows.shape[1] // sum_group(rows.shape[1]) if exact else 1
    return rows.new_empty(parts, MAX_ROWS, dtype=torch.float32)


def _row(width: int, pdl: bool, exact: bool = False) -> dict[str, Any]:
    """The parameters of every kernel that gives each program a whole row."""
    block = power_of_2(width)
    sizes = {"WIDTH": width, "BLOCK": block, "PDL": pdl, "launch_pdl": pdl}
    options = {"GROUP": sum_group(width), "enable_fp_fusion": False} if exact else {"GROUP": 0}
    return {**sizes, **options, "num_warps": min(max(block // 512, 1), 16)}


@triton.jit
def _sum(squares, GROUP: tl.constexpr):
    """The sum of a whole row [BLOCK]; in no order of its own where GROUP is 0."""
    if GROUP == 0:
        total = tl.sum(squares)
    else:
        total = tl.sum(halving_sum(tl.reshape(squares, (1, squares.shape[0]))))
    return total


@triton.jit
def _leave_sums(sums, squares, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """The row's sums over groups of GROUP columns; 0: over all of them."""
    row = tl.program_id(0)
    if GROUP == 0:
        tl.store(sums + row, tl.sum(squares))
    else:
        GROUPS: tl.constexpr = squares.shape[0] // GROUP
        group = tl.arange(0, GROUPS)
        parts = halving_sum(tl.reshape(squares, (GROUPS, GROUP)))
        tl.store(sums + group * SUMS_WIDTH + row, parts, mask=group < WIDTH // GROUP)


@kernel(do_not_specialize=["apart"])
def _norm(
    x, residual, post, gain, out, sums, stored, scales, turned, apart, given, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, GROUP: tl.constexpr, MODE: tl.constexpr = "",
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if gain is not None:
        scale = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    after_previous(PDL)
    start = tl.program_id(0).to(tl.int64) * WIDTH
    row = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    if post is not None:
        row *= tl.rsqrt(_sum(row * row, GROUP) / WIDTH + eps)
        row *= tl.load(post + column, mask=inside, other=0.0).to(tl.float32)
        row = row.to(x.dtype.element_ty).to(tl.float32)
    if residual is not None:
        row += tl.load(residual + start + column, mask=inside, other=0.0).to(tl.float32)
        rounded = row.to(residual.dtype.element_ty)
        tl.store(residual + start + column, rounded, mask=inside)
        row = rounded.to(tl.float32)
    if sums is not None:
        _leave_sums(sums, row * row, WIDTH, GROUP)
    if out is not None or MODE != "":
        row *= tl.rsqrt(_sum(row * row, GROUP) / WIDTH + eps)
        if gain is not None:
            row *= scale
        made = row.to(x.dtype.element_ty)
        if out is not None:
            tl.store(out + start + column, made, mask=inside)
        if MODE != "":
            number = tl.program_id(0).to(tl.int64)
            rounded_row(made, number, stored, scales, turned, apart, given, WIDTH, MODE)


@kernel(do_not_specialize=["index"])
def _gather(
    source, index, out, sums,
    SCALE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    start = tl.load(index + row).to(tl.int64) * WIDTH
    values = tl.load(source + start + column, mask=column < WIDTH, other=0.0)
    if SCALE != 1.0:
        values = (values.to(tl.float32) * SCALE).to(values.dtype)
    tl.store(out + row * WIDTH + column, values, mask=column < WIDTH)
    if sums is not None:
        wide = values.to(tl.float32)
        _leave_sums(sums, wide * wide, WIDTH, GROUP)


@kernel(do_not_specialize=["places", "place"])
def _put(x, out, places, place, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    values = tl.load(x + row * WIDTH + column, mask=column < WIDTH)
    tl.store(out + (row * places + place) * WIDTH + column, values, mask=column < WIDTH)


@kernel(do_not_specialize=["apart"])
def _act_mul(
    gate_up, out, scales, turned, apart, INNER: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr,
    PDL: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    start = gate_up + row * 2 * INNER + column
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + INNER, mask=inside, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(steepness(gate, GELU)) * up
    made = product.to(gate_up.dtype.element_ty)
    if MODE == "":
        tl.store(out + row * INNER + column, made, mask=inside)
    else:
        block = tl.program_id(1) * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
        rounded, scale = quantised(tl.reshape(made, (BLOCK // 128, 128)), MODE == "powers")
        store_scales(scales, turned, apart, row, block, scale, (INNER + 127) // 128)
        tl.store(out + row * INNER + column, tl.reshape(rounded, (BLOCK,)), mask=inside)


@kernel
def _gate_rows(x, gates, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gates + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + row * WIDTH + column, (value / (1.0 + tl.exp(-gate))).to(x.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=["kv_rows", "positions"])
def _rope_write(
    qkv,
    q_out,
    layer,
    page_stride,
    kv_rows,
    cos,
    sin,
    positions,
    bias,
    q_gain,
    k_gain,
    eps,
    STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SHARE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some heads of one row: of q, of k, or of v. In the pool they stand SHARE values apart."""
    after_previous(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_blocks: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    kv_blocks: tl.constexpr = (KV_HEADS + BLOCK - 1) // BLOCK
    of_row = qkv + row * STRIDE
    place = tl.load(kv_rows + row).to(tl.int64)
    stored = pool_row(layer, place, page_stride, PAGE, KV_HEADS * SHARE)
    angle, half = tl.load(positions + row).to(tl.int64) * (DIM // 2), tl.arange(0, HALF)
    c = tl.load(cos + angle + half, mask=half < DIM // 2, other=0.0)[None, :]
    s = tl.load(sin + angle + half, mask=half < DIM // 2, other=0.0)[None, :]
    if block < q_blocks:
        at, inside = _heads_at(block, HEADS, DIM, BLOCK, HALF)
        low, high = _head_norm(of_row, bias, at, inside, q_gain, eps, DIM, HALF)
        low, high = rotated(low, high, c, s)
        store_halves(q_out + row * HEADS * DIM + at, low, high, inside, DIM // 2)
    elif block < q_blocks + kv_blocks:
        at, inside = _heads_at(block - q_blocks, KV_HEADS, DIM, BLOCK, HALF)
        low, high = _head_norm(of_row, bias, HEADS * DIM + at, inside, k_gain, eps, DIM, HALF)
        low, high = rotated(low, high, c, s)
        head = (block - q_blocks) * BLOCK + tl.arange(0, BLOCK)
        to = stored + _places(head, SHARE, HALF)
        scales = pool_scale(layer, place, 0, head, page_stride, PAGE, KV_HEADS, DIM)
        stored_heads = (head < KV_HEADS) & (place >= 0)
        store_scaled(to, scales, low, high, inside & (place >= 0), stored_heads, DIM // 2)
    else:
        at, inside = _heads_at(block - q_blocks - kv_blocks, KV_HEADS, DIM, BLOCK, HALF)
        low, high = _head_norm(of_row, bias, (HEADS + KV_HEADS) * DIM + at, inside, None, eps, DIM, HALF)
        head = (block - q_blocks - kv_blocks) * BLOCK + tl.arange(0, BLOCK)
        to = stored + PAGE * KV_HEADS * SHARE + _places(head, SHARE, HALF)
        scales = pool_scale(layer, place, 1, head, page_stride, PAGE, KV_HEADS, DIM)
        stored_heads = (head < KV_HEADS) & (place >= 0)
        store_scaled(to, scales, low, high, inside & (place >= 0), stored_heads, DIM // 2)


@triton.jit
def _places(head, EACH: tl.constexpr, HALF: tl.constexpr):
    """The places of the first halves of heads that stand EACH values apart, [n, HALF]."""
    return head[:, None] * EACH + tl.arange(0, HALF)[None, :]


@triton.jit
def _heads_at(block, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr):
    """The places of the first halves of a block of heads [BLOCK, HALF], and which of them are not padding."""
    head = (block * BLOCK + tl.arange(0, BLOCK))[:, None]
    half = tl.arange(0, HALF)[None, :]
    return head * DIM + half, (head < HEADS) & (half < DIM // 2)


@triton.jit
def _head_norm(source, bias, at, inside, gain, eps, DIM: tl.constexpr, HALF: tl.constexpr):
    """Both halves of the heads in float32: with a bias, and with a gain normalised, each rounded as by a
    kernel of its own.
    """
    low = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + at + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        low += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(bias + at + DIM // 2, mask=inside, other=0.0).to(tl.float32)
        low = low.to(source.dtype.element_ty).to(tl.float32)
        high = high.to(source.dtype.element_ty).to(tl.float32)
    if gain is not None:
        half = tl.arange(0, HALF)
        real = half < DIM // 2
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
        low_gain = tl.load(gain + half, mask=real, other=0.0).to(tl.float32)[None, :]
        high_gain = tl.load(gain + half + DIM // 2, mask=real, other=0.0).to(tl.float32)[None, :]
        low = (low * scale * low_gain).to(source.dtype.element_ty).to(tl.float32)
        high = (high * scale * high_gain).to(source.dtype.element_ty).to(tl.float32)
    return low, high
