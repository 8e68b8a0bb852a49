"""Of one row's first product: the row that is cached, and the queries, by one launch.

The queries' inner row is short, so each program norms and rounds it by itself, to the bit as a launch of its
own does (`latent_rows`), and multiplies weights that wait in its registers (`single`). One program beside
them writes what is cached. It is no `exact` arithmetic.
"""

from __future__ import annotations

import torch
import triton.language as tl

from eyas.engine.kernels.latent.latent_rows import InnerNorms, keep_row
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.kernels.products.blocks import SIDE, StoredWeight, quantised
from eyas.engine.kernels.products.rope_store import pool_row
from eyas.engine.kernels.products.single import spread
from eyas.engine.kernels.products.skinny import KvRows, RotaryInput, empty_padded

_ROWS = 8  # of the weight, for each program
_LONGEST = 2048  # numbers of the inner row


def takes(rows: int, norms: InnerNorms, weight: StoredWeight) -> bool:
    """True if `query` takes this: one row, whose inner row is normed, and rounded in blocks."""
    rounding = weight.rounding
    blocks = rounding is not None and rounding.rows == "block" and norms.rounding == rounding
    return rows == 1 and norms.query is not None and blocks and weight.shape[1] <= _LONGEST


def query(
    x: torch.Tensor,
    norms: InnerNorms,
    rotation: RotaryInput,
    kv: KvRows,
    weight: StoredWeight,
    pdl: bool = False,
) -> torch.Tensor:
    """A row x [1, k + latent + rotated] and weight [n, k] -> queries [1, n]; what is cached goes to the pool,
    as by `latent_rows.write_latents`.
    """
    (n, k), latent, width = weight.shape, norms.latent.shape[0], kv.layer.shape[4]
    assert weight.rounding is not None and norms.query is not None
    out = empty_padded(1, n, like=x)
    _query[(cdiv(n, _ROWS) + 1,)](
        *(x, norms.query, norms.latent, weight.stored, weight.scales, out),
        *(kv.layer, kv.layer.stride(0), kv.rows, rotation.cos, rotation.sin, rotation.positions, norms.eps),
        N=n,
        K=k,
        ROWS=_ROWS,
        BLOCK=max(power_of_2(k), SIDE),
        LATENT=latent,
        HALF=(width - latent) // 2,
        PAGE=kv.layer.shape[2],
        POWERS=weight.rounding.powers,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


@kernel(do_not_specialize=["kv_rows", "positions"])
def _query(
    x, query_gain, latent_gain, weights, scales, out, layer, page_stride, kv_rows, cos, sin, positions, eps,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LATENT: tl.constexpr,
    HALF: tl.constexpr, PAGE: tl.constexpr, POWERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, and one for what is cached)."""
    TILES: tl.constexpr = (N + ROWS - 1) // ROWS
    tile = tl.program_id(0)
    if tile < TILES:
        row, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
        inside = column < K
        at = weights + row.to(tl.int64)[:, None] * K + column[None, :]
        weight = tl.load(at, mask=(row < N)[:, None] & inside[None, :], other=0.0)
        by_column = spread(scales + tile * ROWS // 128 * ((K + 127) // 128), K, BLOCK)
        gains = tl.load(query_gain + column, mask=inside, other=0.0).to(tl.float32)
        after_previous(PDL)
        values = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        made = (values * tl.rsqrt(tl.sum(values * values, 0) / K + eps) * gains).to(x.dtype.element_ty)
        rounded, scale = quantised(tl.reshape(made, (BLOCK // 128, 128)), POWERS)
        read = tl.reshape(rounded.to(tl.float32) * scale[:, None], (BLOCK,)) * by_column
        y = tl.sum(weight.to(tl.float32) * read[None, :], 1)
        tl.store(out + row, y.to(out.dtype.element_ty), mask=row < N)
    else:
        gain = tl.load(latent_gain + tl.arange(0, LATENT))
        after_previous(PDL)
        place, angle = tl.load(kv_rows).to(tl.int64), tl.load(positions).to(tl.int64) * HALF
        stored = pool_row(layer, place, page_stride, PAGE, LATENT + 2 * HALF)
        keep_row(x + K, stored, place >= 0, gain, cos + angle, sin + angle, eps, LATENT, HALF)
