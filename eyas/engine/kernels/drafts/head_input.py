"""The input of a draft head: [token embedding ; feature], both normalised or both as they are.

The gains of both norms are folded into the projection that follows. Sources: EAGLE-3 (arXiv 2503.01840),
section 3.1; DeepSeek-V3 (arXiv 2412.19437), section 2.2; without norms EAGLE (arXiv 2401.15077), section 4.1.
"""

from __future__ import annotations

import torch
import triton.language as tl

from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import power_of_2
from eyas.engine.kernels.products.skinny import empty_padded


def join(
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    features: torch.Tensor,
    eps: float | None,
    pdl: bool,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """tokens int32 [m], embedding [vocab, hidden], features [m, hidden] -> [m, 2 * hidden].

    `eps`: of both norms (None: there are none). `pdl`: use programmatic dependent launch. `positions` int32
    [m]: of the rows, if the embedding of the one at position 0 counts as zeros.
    """
    rows, hidden = features.shape
    out = empty_padded(rows, 2 * hidden, like=features)
    _join[(rows, 2)](
        tokens,
        embedding,
        features,
        positions,
        out,
        eps or 0.0,
        NORMS=eps is not None,
        HIDDEN=hidden,
        BLOCK=power_of_2(hidden),
        PDL=pdl,
        num_warps=8 if hidden > 1024 else 4,
        launch_pdl=pdl,
    )
    return out


@kernel(do_not_specialize=["eps"], do_not_specialize_on_alignment=["positions"])
def _join(
    tokens,
    embedding,
    features,
    positions,
    out,
    eps,
    NORMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    source = features + row * HIDDEN
    if half == 0:
        source = embedding + tl.load(tokens + row).to(tl.int64) * HIDDEN
    present = inside
    if positions is not None:
        present = inside & ((half == 1) | (tl.load(positions + row) > 0))
    x = tl.load(source + column, mask=present, other=0.0).to(tl.float32)
    if NORMS:
        x *= tl.rsqrt(tl.sum(x * x) / HIDDEN + eps)
    tl.store(out + (row * 2 + half) * HIDDEN + column, x.to(out.dtype.element_ty), mask=inside)
