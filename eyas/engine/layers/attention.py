"""The self-attention block: project, rotate, store keys and values, attend, project back.

How a query finds its keys is the backend's business; where rows lie is the pool's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from eyas.engine.attention.base import AttentionBackend, Plan
from eyas.engine.checkpoint.config import AttentionSpec, ModelConfig
from eyas.engine.checkpoint.rope import Rope
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.linear import Linear
from eyas.engine.layers.norm import RmsNorm, load_gain
from eyas.engine.layers.rotary import Angles, Rotary, head_order


@dataclass(frozen=True)
class Step:
    """What every layer of one forward shares.

    `slots` [R]: `KvPool.slots` of the rows being written. `angles`: of each RoPE that a layer has.
    """

    pool: KvPool
    slots: torch.Tensor
    plan: Plan
    angles: Mapping[Rope, Angles]
    backend: AttentionBackend


class Attention:
    """Grouped-query attention over the paged pool. `width`: columns of its input (a draft head joins two)."""

    def __init__(
        self, config: ModelConfig, spec: AttentionSpec, weights: Weights, prefix: str, width: int
    ) -> None:
        self._spec = spec
        self._heads, self._kv_heads, self._dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        rows = [self._heads * self._dim, self._kv_heads * self._dim, self._kv_heads * self._dim]
        names = [f"{prefix}.{p}_proj" for p in "qkv"]
        out, hidden = f"{prefix}.o_proj", config.hidden_size
        qkv_bias = out_bias = self._q_norm = self._k_norm = None
        order = rows_order(spec, self._heads, self._kv_heads)
        every = slice(None) if order is None else order
        if spec.qkv_bias:
            pairs = zip(names, rows, strict=True)
            qkv_bias = torch.cat([weights.take(f"{n}.bias", (r,)) for n, r in pairs])[every]
        if spec.output_bias:
            out_bias = weights.take(f"{out}.bias", (hidden,))
        stored, back = [f"{n}.weight" for n in names], f"{out}.weight"
        self._qkv = Linear(weights.stack(stored, rows, width)[every], qkv_bias, weights.rounding(stored))
        self._out = Linear(weights.take(back, (hidden, rows[0])), out_bias, weights.rounding([back]))
        if spec.head_norms or spec.row_norms:
            gains = query_key_gains(config, spec, weights, prefix)
            self._q_norm, self._k_norm = (RmsNorm(gain, config.norm_eps) for gain in gains)

    def __call__(self, x: torch.Tensor, layer: int, step: Step) -> torch.Tensor:
        """x [R, width] -> [R, hidden]; rows beyond `step.slots` are padding and write nothing."""
        qkv = self._qkv(x).view(x.shape[0], -1, self._dim)
        qk, v = qkv[:, : -self._kv_heads], qkv[:, -self._kv_heads :]
        if self._q_norm is not None and self._k_norm is not None:
            qk = torch.cat((self._q_norm(qk[:, : self._heads]), self._k_norm(qk[:, self._heads :])), 1)
        qk = Rotary.rotate(qk, step.angles[self._spec.rope])
        q, k = qk[:, : self._heads], qk[:, self._heads :]
        step.pool.write(layer, step.slots, k, v)
        attended = step.backend.run(q, step.pool.layer(layer), step.plan, self._spec)
        return self._out(attended.view(x.shape[0], -1))


def rows_order(spec: AttentionSpec, heads: int, kv_heads: int) -> torch.Tensor | None:
    """The stored row of each row of q, k and v, one below the other: int64 [(heads + 2 kv_heads) * dim].

    None: they are stored in the order that attention needs.
    """
    dim = spec.head_dim
    if spec.rope.rotated(dim) == dim:
        return None
    rows = torch.arange((heads + 2 * kv_heads) * dim).view(-1, dim)
    return torch.cat((rows[:-kv_heads, head_order(spec.rope, dim)], rows[-kv_heads:])).flatten()


def query_key_gains(
    config: ModelConfig, spec: AttentionSpec, weights: Weights, prefix: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the norms of q and of k: [dim] for each head, or [heads, dim] for all heads as one row."""
    counts = (spec.num_heads, spec.num_kv_heads) if spec.row_norms else (1, 1)
    names = [f"{prefix}.{part}_norm.weight" for part in "qk"]
    stored = [load_gain(config, weights, n, c * spec.head_dim) for n, c in zip(names, counts, strict=True)]
    order = head_order(spec.rope, spec.head_dim).to(stored[0].device)
    q, k = (gain.view(count, -1)[:, order] for gain, count in zip(stored, counts, strict=True))
    return (q, k) if spec.row_norms else (q[0], k[0])
