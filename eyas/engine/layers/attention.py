"""The self-attention block: project, rotate, store keys and values, attend, project back.

How a query finds its keys is the backend's business; where rows lie is the pool's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.engine.attention.base import AttentionBackend, Plan
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.linear import Linear
from eyas.engine.layers.norm import RmsNorm
from eyas.engine.layers.rotary import Angles, Rotary


@dataclass(frozen=True)
class Step:
    """What every layer of one forward shares. `slots` [R]: `KvPool.slots` of the rows being written."""

    pool: KvPool
    slots: torch.Tensor
    plan: Plan
    angles: Angles


class Attention:
    """Grouped-query attention over the paged pool. `width`: columns of its input (a draft head joins two)."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, width: int) -> None:
        self._heads, self._kv_heads, self._dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = [self._heads * self._dim, self._kv_heads * self._dim, self._kv_heads * self._dim]
        names = [f"{prefix}.{p}_proj" for p in "qkv"]
        out, hidden = f"{prefix}.o_proj", config.hidden_size
        qkv_bias = out_bias = self._q_norm = self._k_norm = None
        if config.qkv_bias:
            pairs = zip(names, rows, strict=True)
            qkv_bias = torch.cat([weights.take(f"{n}.bias", (r,)) for n, r in pairs])
        if config.output_bias:
            out_bias = weights.take(f"{out}.bias", (hidden,))
        self._qkv = Linear(weights.stack([f"{n}.weight" for n in names], rows, width), qkv_bias)
        self._out = Linear(weights.take(f"{out}.weight", (hidden, rows[0])), out_bias)
        if config.qk_norm:
            gains = [weights.take(f"{prefix}.{p}_norm.weight", (self._dim,)) for p in "qk"]
            self._q_norm, self._k_norm = (RmsNorm(gain, config.norm_eps) for gain in gains)

    def __call__(
        self, x: torch.Tensor, layer: int, step: Step, rotary: Rotary, backend: AttentionBackend
    ) -> torch.Tensor:
        """x [R, width] -> [R, hidden]; rows beyond `step.slots` are padding and write nothing."""
        qkv = self._qkv(x).view(x.shape[0], -1, self._dim)
        qk, v = qkv[:, : -self._kv_heads], qkv[:, -self._kv_heads :]
        if self._q_norm is not None and self._k_norm is not None:
            qk = torch.cat((self._q_norm(qk[:, : self._heads]), self._k_norm(qk[:, self._heads :])), 1)
        qk = rotary.rotate(qk, step.angles)
        q, k = qk[:, : self._heads], qk[:, self._heads :]
        step.pool.write(layer, step.slots, k, v)
        attended = backend.run(q, step.pool.layer(layer), step.plan)
        return self._out(attended.view(x.shape[0], -1))
