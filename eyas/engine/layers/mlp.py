"""The gated feed-forward block (SwiGLU)."""

from __future__ import annotations

import torch

from eyas.engine.checkpoint.weights import Weights
from eyas.engine.layers.linear import Linear, in_blocks


class SwiGlu:
    """down(silu(gate(x)) * up(x)), gate and up fused into one product."""

    def __init__(self, weights: Weights, prefix: str, hidden: int, inner: int) -> None:
        names = [f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"]
        self._gate_up = Linear(weights.stack(names, [inner, inner], hidden))
        self._down = Linear(weights.take(f"{prefix}.down_proj.weight", (hidden, inner)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, hidden] -> [R, hidden]."""
        # Block by block all the way: the wide intermediate rows stay in the cache.
        return in_blocks(self._block, x)

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        # Not F.silu: its vector body and scalar tail round differently, so a value's bits would depend on
        # where in the tensor it stands. exp, products and quotients do not have that fault.
        return self._down((gate * up).div_(torch.exp(-gate).add_(1.0)))
