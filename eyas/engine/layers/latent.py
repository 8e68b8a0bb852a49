"""Latent attention, absorbed: every head reads the same cached rows (DeepSeek-V2, arXiv 2405.04434, 2.1).

A head's score is its query times (K latent), which is (its query times K) times the latent; its result is V
times the mixed latents. So keys and values of heads are never made, and a prompt's rows have the arithmetic
of generated ones: chunks, cached prefixes and drafts change no bit. How a query finds its keys is the
backend's business, as it is for any attention with one key head.
"""

from __future__ import annotations

import torch

from eyas.engine.checkpoint.config import LatentSpec
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.layers.linear import Linear, in_blocks
from eyas.engine.layers.norm import RmsNorm
from eyas.engine.layers.rotary import Rotary
from eyas.engine.layers.step import Step

EPS = 1e-6
"""Of both inner norms, whatever the model's own is."""


class LatentAttention:
    """Attention over latents, up to what every head has mixed of them. `width`: columns of its input."""

    def __init__(self, spec: LatentSpec, weights: Weights, prefix: str, width: int) -> None:
        self._spec = spec
        self._heads, self._plain, self._latent = spec.num_heads, spec.plain_dim, spec.kv_rank
        query = spec.num_heads * (spec.plain_dim + spec.rotated_dim)
        first, row_name = "q_a_proj" if spec.query_rank else "q_proj", f"{prefix}.kv_a_proj_with_mqa.weight"
        self._query_bias = self._row_bias = None
        rounding = weights.rounding([f"{prefix}.{first}.weight", row_name])  # they read the same rows
        if spec.query_rank:
            stored = weights.take(f"{prefix}.q_a_proj.weight", (spec.query_rank, width))
            self._query_in = Linear(stored, rounding)
            if spec.qkv_bias:
                self._query_bias = weights.take(f"{prefix}.q_a_proj.bias", (spec.query_rank,))
            self._query_norm = _norm(weights, f"{prefix}.q_a_layernorm.weight", spec.query_rank)
        name = f"{prefix}.{'q_b_proj' if spec.query_rank else 'q_proj'}.weight"
        stored = weights.take(name, (query, spec.query_rank or width))
        per_head = halves_last(stored.view(spec.num_heads, -1, stored.shape[1]), spec)
        second = weights.rounding([name]) if spec.query_rank else rounding
        self._query = Linear(per_head.reshape(stored.shape), second)
        row = weights.take(row_name, (spec.head_dim, width))
        if spec.qkv_bias:
            stored = weights.take(f"{prefix}.kv_a_proj_with_mqa.bias", (spec.head_dim,))
            self._row_bias = halves_last(stored[None, :, None], spec).flatten()
        self._row = Linear(halves_last(row[None], spec)[0], rounding)
        self._row_norm = _norm(weights, f"{prefix}.kv_a_layernorm.weight", spec.kv_rank)
        parts = (spec.plain_dim, spec.value_dim)
        factors = weights.take(f"{prefix}.kv_b_proj.weight", (spec.num_heads * sum(parts), spec.kv_rank))
        keys, values = factors.view(spec.num_heads, -1, spec.kv_rank).split(parts, 1)
        self._keys = keys.contiguous()  # [heads, plain, latent]
        self._values = values.transpose(1, 2).contiguous()  # [heads, latent, value]

    def __call__(self, x: torch.Tensor, layer: int, step: Step) -> torch.Tensor:
        """x [R, width] -> [R, heads * value]; rows beyond `step.slots` are padding and write nothing."""
        angles = step.angles[self._spec.rope]
        row = self._row(x, self._row_bias)
        latent, key = row[:, : self._latent], row[:, None, self._latent :]
        key = Rotary.rotate(key, angles)[:, 0]
        step.pool.write(layer, step.slots, torch.cat((self._row_norm(latent), key), -1))
        read = self._query_norm(self._query_in(x, self._query_bias)) if self._spec.query_rank else x
        query = self._query(read).view(x.shape[0], self._heads, -1)
        plain, rotated = query[..., : self._plain], query[..., self._plain :]
        query = torch.cat((_per_head(plain, self._keys), Rotary.rotate(rotated, angles)), -1)
        mixed = step.backend.run(query, step.pool.layer(layer), step.plan, self._spec)
        return _per_head(mixed, self._values).reshape(x.shape[0], -1)


def _per_head(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """x [R, heads, K] times each head's factor [heads, K, N] -> [R, heads, N], in products of one shape."""
    return in_blocks(lambda block: torch.bmm(block.transpose(0, 1), factors).transpose(0, 1), x)


def _norm(weights: Weights, name: str, size: int) -> RmsNorm:
    return RmsNorm(weights.take(name, (size,)), EPS)


def halves_last(stored: torch.Tensor, spec: LatentSpec) -> torch.Tensor:
    """Rows [.., n, columns] whose last `rotated_dim` are paired as `Rotary` pairs them.

    Queries and cached rows are reordered alike, so that scores stay what they are.
    """
    if not spec.adjacent:
        return stored
    first = stored.shape[-2] - spec.rotated_dim
    plain, rotated = stored[..., :first, :], stored[..., first:, :]
    return torch.cat((plain, rotated[..., 0::2, :], rotated[..., 1::2, :]), -2)
