"""Row kernels between the products of many rows, by the arithmetic of the exact narrow products.

A product reads raw rows, and is rounded; then a row kernel scales it by 1 / rms and goes on as the narrow
kernel's epilogue does. So a row has the same bits on either way, if the products have: `product` leaves them
to cuBLAS, whose unsplit kernels fold k in order like the narrow ones wherever `tests.gpu.exact_first` finds
it so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.kernels.products.activation import steepness
from eyas.engine.kernels.products.exact_fold import fold_matmul
from eyas.engine.kernels.products.halving import halving_sum
from eyas.engine.kernels.products.rope_store import (
    pool_row,
    pool_scale,
    rotated,
    store_halves,
    store_scaled,
)
from eyas.engine.kernels.products.rows import HeadLayout
from eyas.engine.kernels.products.skinny import MAX_ROWS, HeadNorms, KvRows, ProductLaunch, RotaryInput
from eyas.engine.kernels.products.skinny_tiles import ProductShape, stretches_of

_PRODUCTS = 1024  # elements of a row that a program of `act_mul` makes
_HEADS = 8  # of a row that a program of `rope_write` rotates
_FEW_COLUMNS = 16  # of a weight that is one number of each row


@dataclass(frozen=True)
class AfterQkv:
    """The bias [(heads + 2 kv_heads) * dim] of q, k and v, and what heads pass before they are rotated. `pdl`
    as of `settle`.
    """

    bias: torch.Tensor | None = None
    norms: HeadNorms | None = None
    pdl: bool = False


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    launch: ProductLaunch,
    kind: str = "linear",
    span: int = 0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [m, k] . weight [n, k]^T -> [m, n], rounded once to `dtype` (None: x's); `kind` and `span` as of
    `skinny_tiles.ProductShape`.
    """
    (n, k), dtype = weight.shape, dtype or x.dtype
    if stretches_of(ProductShape(kind, x.shape[0], n, k, span or n)) == 1:
        return matmul(x, weight, launch, dtype)
    return total(shares(x, weight, launch, kind, span), dtype)


def shares(
    x: torch.Tensor, weight: torch.Tensor, launch: ProductLaunch, kind: str = "linear", span: int = 0
) -> torch.Tensor:
    """Each stretch of k of x [m, k] . weight [n, k]^T: float32 [stretches, m, n], for `total` or `settle` to
    add up. Where there is one: the product [m, n], rounded to x's type.
    """
    m, (n, k) = x.shape[0], weight.shape
    count = stretches_of(ProductShape(kind, m, n, k, span or n))
    if count == 1:
        return matmul(x, weight, launch, x.dtype)
    made = x.new_empty(count, m, n, dtype=torch.float32)
    for part, columns, out in zip(x.split(k // count, 1), weight.split(k // count, 1), made, strict=True):
        matmul(part, columns, launch, torch.float32, out)
    return made


def total(made: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Adds up the result of `shares` in order -> [m, n], rounded once to `dtype`."""
    if made.dim() == 2:
        return made
    *others, last = made
    return torch.add(reduce(torch.add, others), last, out=torch.empty_like(last, dtype=dtype))


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    launch: ProductLaunch,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x . weight^T, added up in float32 from the beginning of k to its end, rounded once to `dtype`; in
    `out`, if it is given.
    """
    few = x.shape[0] <= MAX_ROWS or weight.shape[0] <= _FEW_COLUMNS
    if few or not launch.cublas:  # of few rows or columns no one has asked cuBLAS
        return fold_matmul(x, weight, dtype, launch.compile_only, out)
    if dtype == x.dtype:
        return torch.mm(x, weight.t(), out=out)
    return torch.mm(x, weight.t(), out_dtype=dtype, out=out)


def settle(
    residual: torch.Tensor,
    eps: float,
    added: torch.Tensor | None = None,
    post: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Computes residual [m, hidden] += `added`, or its norm with gain `post` [hidden]; in place and rounded.
    `added`: [m, hidden], or the result of `shares`, whose total is rounded first.

    Returns 1 / rms of the residual's rows, float32 [m]. pdl: the kernel may be launched before the one before
    it has ended, and waits for it.
    """
    rows, width = residual.shape
    scales, block = residual.new_empty(rows, dtype=torch.float32), power_of_2(width)
    count = added.shape[0] if added is not None and added.dim() == 3 else 1
    sizes = {"WIDTH": width, "BLOCK": block, "SHARES": count, "PDL": pdl}
    options = {"num_warps": min(max(block // 512, 1), 16), "launch_pdl": pdl, "enable_fp_fusion": False}
    _settle[(rows,)](residual, added, post, scales, eps, **sizes, **options)
    return scales


def act_mul(
    gate_up: torch.Tensor, scales: torch.Tensor, gelu: bool = False, pdl: bool = False
) -> torch.Tensor:
    """Rows [gate ; up] [m, 2 * inner] of raw products, scales [m] -> act(gate) * up [m, inner]. `pdl` as of
    `settle`.
    """
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner)
    sizes = {"INNER": inner, "BLOCK": _PRODUCTS, "GELU": gelu, "PDL": pdl, "num_warps": 4}
    grid = (rows, cdiv(inner, _PRODUCTS))
    _act_mul[grid](gate_up, scales, out, **sizes, launch_pdl=pdl, enable_fp_fusion=False)
    return out


def rope_write(
    raw: torch.Tensor,
    scales: torch.Tensor,
    after: AfterQkv,
    q: torch.Tensor,
    rotation: RotaryInput,
    kv: KvRows,
) -> None:
    """Raw products [m, (heads + 2 kv_heads) * dim], scales [m]: rotated q goes to q [m, heads, dim], k and v
    to the pool. A row at -1 in `kv` writes no k and v.
    """
    heads = HeadLayout(q.shape[1], kv.layer.shape[3], kv.layer.shape[4], after.norms)
    gains, eps = (None, 0.0) if heads.norms is None else (heads.norms.gains, heads.norms.eps)
    programs = cdiv(heads.q + 2 * heads.kv, _HEADS)
    _rope_write[(raw.shape[0], programs)](
        *(raw, scales, after.bias, gains, q, kv.layer, kv.layer.stride(0), kv.rows),
        *(rotation.cos, rotation.sin, rotation.positions, eps),
        HEADS=heads.q,
        KV_HEADS=heads.kv,
        DIM=heads.dim,
        PAGE=kv.layer.shape[2],
        BLOCK=_HEADS,
        PDL=after.pdl,
        num_warps=2,
        launch_pdl=after.pdl,
        enable_fp_fusion=False,
    )


@triton.jit
def _row_sum(squares):
    """The sum of a whole row, in the order in which the narrow products' readers add up groups."""
    return tl.sum(halving_sum(tl.reshape(squares, (1, squares.shape[0]))))


@kernel
def _settle(
    residual, added, post, scales, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    row = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        more = tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        if SHARES > 1:
            for share in tl.static_range(1, SHARES):
                apart = tl.num_programs(0).to(tl.int64) * (share * WIDTH)
                more += tl.load(added + apart + at, mask=inside, other=0.0)
            more = more.to(residual.dtype.element_ty).to(tl.float32)
        if post is not None:
            more *= tl.rsqrt(_row_sum(more * more) / WIDTH + eps)
            more *= tl.load(post + column, mask=inside, other=0.0).to(tl.float32)
            more = more.to(residual.dtype.element_ty).to(tl.float32)
        rounded = (more + row).to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=inside)
        row = rounded.to(tl.float32)
    tl.store(scales + tl.program_id(0), tl.rsqrt(_row_sum(row * row) / WIDTH + eps))


@kernel
def _act_mul(
    gate_up, scales, out, INNER: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    start = gate_up + row * 2 * INNER + column
    scale = tl.load(scales + row)
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32) * scale
    up = tl.load(start + INNER, mask=inside, other=0.0).to(tl.float32) * scale
    y = gate * up / (1.0 + tl.exp(-steepness(gate, GELU)))
    tl.store(out + row * INNER + column, y.to(out.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=["kv_rows", "positions"])
def _rope_write(
    raw, scales, bias, gains, q_out, layer, page_stride, kv_rows, cos, sin, positions, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some heads of one row, side by side: of q, then of k, then of v."""
    after_previous(PDL)
    row, HALF = tl.program_id(0).to(tl.int64), DIM // 2
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    there = head < HEADS + 2 * KV_HEADS
    half = tl.arange(0, DIM // 2)[None, :]
    of_head = head * DIM + half
    at = raw + row * ((HEADS + 2 * KV_HEADS) * DIM) + of_head
    scale = tl.load(scales + row)
    low = tl.load(at, mask=there, other=0.0).to(tl.float32) * scale
    high = tl.load(at + HALF, mask=there, other=0.0).to(tl.float32) * scale
    if bias is not None:
        low += tl.load(bias + of_head, mask=there, other=0.0).to(tl.float32)
        high += tl.load(bias + of_head + HALF, mask=there, other=0.0).to(tl.float32)
    turned = head < HEADS + KV_HEADS
    if gains is not None:
        gain = gains + (head >= HEADS) * DIM + half
        inverse = tl.rsqrt((halving_sum(low * low) + halving_sum(high * high)) / DIM + eps)[:, None]
        low = tl.where(turned, low * (inverse * tl.load(gain).to(tl.float32)), low)
        high = tl.where(turned, high * (inverse * tl.load(gain + HALF).to(tl.float32)), high)
    angle = tl.load(positions + row).to(tl.int64) * HALF + half
    c = tl.where(turned, tl.load(cos + angle), 1.0)
    s = tl.where(turned, tl.load(sin + angle), 0.0)
    low, high = rotated(low, high, c, s)
    place = tl.load(kv_rows + row).to(tl.int64)
    slot = pool_row(layer, place, page_stride, PAGE, KV_HEADS * DIM)
    which = (head - HEADS) // KV_HEADS  # keys or values
    stored = slot + which * (PAGE * KV_HEADS * DIM) + (head - HEADS) % KV_HEADS * DIM + half
    store_halves(q_out + row * (HEADS * DIM) + of_head, low, high, head < HEADS, HALF)
    real = there & (head >= HEADS) & (place >= 0)
    scales = pool_scale(layer, place, which, (head - HEADS) % KV_HEADS, page_stride, PAGE, KV_HEADS, DIM)
    store_scaled(stored, tl.reshape(scales, (BLOCK,)), low, high, real, tl.reshape(real, (BLOCK,)), HALF)
