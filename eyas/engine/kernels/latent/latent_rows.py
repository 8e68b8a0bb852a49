"""Norms over the rows of latent attention's first products, and the store of the row that is cached.

A cached row is the latent, normalised, and behind it the rotated key that all heads share. The queries' row
between the two factors of their projection is normalised as well. One program each; sums are float32, results
are rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import power_of_2
from eyas.engine.kernels.products.blocks import SIDE, Fp8Rows, mode_of, room_for, rounded_row
from eyas.engine.kernels.products.rope_store import pool_row, rotated, store_halves, store_rounded
from eyas.engine.kernels.products.skinny import KvRows, RotaryInput, empty_padded


@dataclass(frozen=True)
class InnerNorms:
    """Gains of the norm of the latent [latent], and of the queries' inner row [query rank] (None: none).

    `rounding`: by which the product that reads the queries' inner row rounds it; None: as it is.
    """

    latent: torch.Tensor
    query: torch.Tensor | None
    eps: float
    rounding: RowRounding | None = None


def write_latents(
    x: torch.Tensor, norms: InnerNorms, rotation: RotaryInput, kv: KvRows, pdl: bool = False
) -> torch.Tensor | Fp8Rows:
    """Rows x [m, queries + latent + rotated] -> the queries [m, queries], normalised if there is a gain.

    Latents go to the pool, normalised, and keys, rotated in float32, element i with i + rotated / 2. kv.layer
    [pages, 1, page_size, 1, latent + rotated]; a row at -1 writes nothing. Without a gain the queries are
    those of x itself, strided.
    """
    latent, width = norms.latent.shape[0], kv.layer.shape[4]
    queries = x.shape[1] - width
    rounding = norms.rounding if norms.query is not None else None
    out = rounded = scales = turned = None
    apart = 0
    if rounding is not None:
        rounded = room_for(x[:, :queries], rounding, turned=True)
        out, scales, turned, apart = rounded.places
    elif norms.query is not None:
        out = empty_padded(x.shape[0], queries, like=x)
    _write[(x.shape[0], 1 if out is None else 2)](
        *(x, out, norms.query, norms.latent, kv.layer, kv.layer.stride(0), kv.rows),
        *(rotation.cos, rotation.sin, rotation.positions, norms.eps),
        *(scales, turned, apart, 0.0 if rounding is None else rounding.scale),
        MODE="" if rounding is None else mode_of(rounding),
        QUERIES=queries,
        BLOCK=power_of_2(max(queries, SIDE)),
        LATENT=latent,
        HALF=(width - latent) // 2,
        PAGE=kv.layer.shape[2],
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return rounded or (x[:, :queries] if out is None else out)


@kernel(do_not_specialize=["kv_rows", "positions", "apart"])
def _write(
    x,
    out,
    query_gain,
    latent_gain,
    layer,
    page_stride,
    kv_rows,
    cos,
    sin,
    positions,
    eps,
    scales,
    turned,
    apart,
    given,
    MODE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (m, 2): what is kept of a row, and its queries."""
    row = tl.program_id(0).to(tl.int64)
    start = x + row * (QUERIES + LATENT + 2 * HALF)
    if tl.program_id(1) == 0:
        gain = tl.load(latent_gain + tl.arange(0, LATENT))
        after_previous(PDL)
        place = tl.load(kv_rows + row).to(tl.int64)
        angle = tl.load(positions + row).to(tl.int64) * HALF
        stored = pool_row(layer, place, page_stride, PAGE, LATENT + 2 * HALF)
        keep_row(start + QUERIES, stored, place >= 0, gain, cos + angle, sin + angle, eps, LATENT, HALF)
    elif out is not None:
        of_row = tl.arange(0, BLOCK)
        inside = of_row < QUERIES
        gains = tl.load(query_gain + of_row, mask=inside, other=0.0)
        after_previous(PDL)
        query = tl.load(start + of_row, mask=inside, other=0.0).to(tl.float32)
        query = _normed(query, gains, eps, QUERIES)
        made = query.to(x.dtype.element_ty)
        if MODE == "":
            tl.store(out + row * QUERIES + of_row, made, mask=inside)
        else:
            rounded_row(made, row, out, scales, turned, apart, given, QUERIES, MODE)


@triton.jit
def keep_row(source, stored, there, gain, cos, sin, eps, LATENT: tl.constexpr, HALF: tl.constexpr):
    """One row: its latent, normalised with `gain` [LATENT], and its key, rotated."""
    column, half = tl.arange(0, LATENT), tl.arange(0, HALF)
    latent = tl.load(source + column).to(tl.float32)
    latent = _normed(latent, gain, eps, LATENT)
    store_rounded(stored + column, latent, there & (column >= 0))
    low = tl.load(source + LATENT + half).to(tl.float32)
    high = tl.load(source + LATENT + HALF + half).to(tl.float32)
    c, s = tl.load(cos + half), tl.load(sin + half)
    low, high = rotated(low, high, c, s)
    store_halves(stored + LATENT + half, low, high, there & (half >= 0), HALF)


@triton.jit
def _normed(row, gain, eps, WIDTH: tl.constexpr):
    return row * tl.rsqrt(tl.sum(row * row) / WIDTH + eps) * gain.to(tl.float32)
