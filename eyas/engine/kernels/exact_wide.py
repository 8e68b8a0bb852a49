"""What many rows pass between their products, by the arithmetic of the exact narrow products.

A product reads raw rows, and is rounded; then a row kernel scales it by 1 / rms and goes on as the narrow
kernel's epilogue does. So a row has the same bits on either way, if the products have: `product` leaves them
to cuBLAS, whose unsplit kernels fold k in order like the narrow ones wherever `tests.gpu.exact_first` finds
it so. It knows rows, weights and the pool's layout, and knows no models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.activation import steepness
from eyas.engine.kernels.exact_fold import fold_matmul
from eyas.engine.kernels.halving import halving_sum
from eyas.engine.kernels.rows import Heads
from eyas.engine.kernels.skinny import MAX_ROWS, HeadNorms, KvRows, Launch, Rotation
from eyas.engine.kernels.skinny_tiles import Shape, stretches_of

_PRODUCTS = 1024  # elements of a row that a program of `act_mul` makes


@dataclass(frozen=True)
class AfterQkv:
    """The bias [(heads + 2 kv_heads) * dim] of q, k and v, and what heads pass before they are rotated."""

    bias: torch.Tensor | None = None
    norms: HeadNorms | None = None


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    launch: Launch,
    kind: str = "linear",
    span: int = 0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [m, k] . weight [n, k]^T -> [m, n], rounded once to `dtype` (None: x's); `kind` and `span` as of
    `skinny_tiles.Shape`.
    """
    (n, k), dtype = weight.shape, dtype or x.dtype
    count = stretches_of(Shape(kind, x.shape[0], n, k, span or n))
    if count == 1:
        return matmul(x, weight, launch, dtype)
    pairs = zip(x.split(k // count, 1), weight.split(k // count, 1), strict=True)
    total, *others, last = (matmul(part, columns, launch, torch.float32) for part, columns in pairs)
    for more in others:
        total += more
    return torch.add(total, last, out=torch.empty_like(total, dtype=dtype))


def matmul(x: torch.Tensor, weight: torch.Tensor, launch: Launch, dtype: torch.dtype) -> torch.Tensor:
    """x . weight^T, added up in float32 from the beginning of k to its end, rounded once to `dtype`."""
    if not launch.cublas or x.shape[0] <= MAX_ROWS:  # of few rows no one has asked cuBLAS
        return fold_matmul(x, weight, dtype, launch.compile_only)
    return torch.mm(x, weight.t()) if dtype == x.dtype else torch.mm(x, weight.t(), out_dtype=dtype)


def settle(
    residual: torch.Tensor, eps: float, added: torch.Tensor | None = None, post: torch.Tensor | None = None
) -> torch.Tensor:
    """residual [m, hidden] += `added`, or its norm with gain `post` [hidden]; in place and rounded.

    Returns 1 / rms of the residual's rows, float32 [m].
    """
    rows, width = residual.shape
    scales, block = residual.new_empty(rows, dtype=torch.float32), triton.next_power_of_2(width)
    sizes = {"WIDTH": width, "BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}
    _settle[(rows,)](residual, added, post, scales, eps, **sizes, enable_fp_fusion=False)
    return scales


def act_mul(gate_up: torch.Tensor, scales: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    """Rows [gate ; up] [m, 2 * inner] of raw products, scales [m] -> act(gate) * up [m, inner]."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner)
    sizes = {"INNER": inner, "BLOCK": _PRODUCTS, "GELU": gelu, "num_warps": 4}
    grid = (rows, triton.cdiv(inner, _PRODUCTS))
    _act_mul[grid](gate_up, scales, out, **sizes, enable_fp_fusion=False)
    return out


def rope_write(
    raw: torch.Tensor, scales: torch.Tensor, after: AfterQkv, q: torch.Tensor, rotation: Rotation, kv: KvRows
) -> None:
    """Raw products [m, (heads + 2 kv_heads) * dim], scales [m]: rotated q goes to q [m, heads, dim], k and v
    to the pool. A row at -1 in `kv` writes no k and v.
    """
    heads = Heads(q.shape[1], kv.layer.shape[3], kv.layer.shape[4], after.norms)
    gains, eps = (None, 0.0) if heads.norms is None else (heads.norms.gains, heads.norms.eps)
    _rope_write[(raw.shape[0], heads.q + 2 * heads.kv)](
        *(raw, scales, after.bias, gains, q, kv.layer, kv.layer.stride(0), kv.rows),
        *(rotation.cos, rotation.sin, rotation.positions, eps),
        HEADS=heads.q,
        KV_HEADS=heads.kv,
        DIM=heads.dim,
        PAGE=kv.layer.shape[2],
        num_warps=1,
        enable_fp_fusion=False,
    )


@triton.jit
def _row_sum(squares):
    """Of a whole row, in the order in which the narrow products' readers add up groups."""
    return tl.sum(halving_sum(tl.reshape(squares, (1, squares.shape[0]))))


@triton.jit
def _settle(residual, added, post, scales, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    row = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        more = tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        if post is not None:
            more *= tl.rsqrt(_row_sum(more * more) / WIDTH + eps)
            more *= tl.load(post + column, mask=inside, other=0.0).to(tl.float32)
            more = more.to(added.dtype.element_ty).to(tl.float32)
        rounded = (more + row).to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=inside)
        row = rounded.to(tl.float32)
    tl.store(scales + tl.program_id(0), tl.rsqrt(_row_sum(row * row) / WIDTH + eps))


@triton.jit
def _act_mul(gate_up, scales, out, INNER: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    start = gate_up + row * 2 * INNER + column
    scale = tl.load(scales + row)
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32) * scale
    up = tl.load(start + INNER, mask=inside, other=0.0).to(tl.float32) * scale
    y = gate * up / (1.0 + tl.exp(-steepness(gate, GELU)))
    tl.store(out + row * INNER + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["kv_rows", "positions"])
def _rope_write(
    raw, scales, bias, gains, q_out, layer, page_stride, kv_rows, cos, sin, positions, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One head of one row: of q, of k, or of v."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = tl.arange(0, DIM // 2)
    of_head = head * DIM + half
    at = raw + row * ((HEADS + 2 * KV_HEADS) * DIM) + of_head
    scale = tl.load(scales + row)
    low, high = tl.load(at).to(tl.float32) * scale, tl.load(at + DIM // 2).to(tl.float32) * scale
    if bias is not None:
        low += tl.load(bias + of_head).to(tl.float32)
        high += tl.load(bias + of_head + DIM // 2).to(tl.float32)
    turned = head < HEADS + KV_HEADS
    if gains is not None and turned:
        gain = gains + (head >= HEADS) * DIM + half
        inverse = tl.rsqrt((_row_sum(low * low) + _row_sum(high * high)) / DIM + eps)
        low *= inverse * tl.load(gain).to(tl.float32)
        high *= inverse * tl.load(gain + DIM // 2).to(tl.float32)
    angle = tl.load(positions + row).to(tl.int64) * (DIM // 2) + half
    c = tl.load(cos + angle, mask=turned, other=1.0)
    s = tl.load(sin + angle, mask=turned, other=0.0)
    low, high = low * c - high * s, high * c + low * s
    place = tl.load(kv_rows + row).to(tl.int64)
    slot = layer + place // PAGE * page_stride + place % PAGE * (KV_HEADS * DIM)
    which = (head - HEADS) // KV_HEADS  # keys or values
    kept = slot + which * (PAGE * KV_HEADS * DIM) + (head - HEADS) % KV_HEADS * DIM + half
    _store(q_out + row * (HEADS * DIM) + of_head, low, high, head < HEADS, DIM // 2)
    _store(kept, low, high, (head >= HEADS) & (place >= 0), DIM // 2)


@triton.jit
def _store(to, low, high, kept, HALF: tl.constexpr):
    tl.store(to, low.to(to.dtype.element_ty), mask=kept)
    tl.store(to + HALF, high.to(to.dtype.element_ty), mask=kept)
