"""Attention of blocks of rows below some pairs of a text: each sees the pairs before it, and its own rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Kv = tuple[Tensor, Tensor]
"""Keys and values."""


@dataclass(frozen=True)
class BlockView:
    """Where A blocks of each of B rows stand. `positions` int64 [B, A]: of their first rows;
    `context` int64 [B or 1, T]: of the pairs; `mask` bool [B, A, T]: the pairs that each block sees;
    `causal`: no row of a block sees those behind it.
    """

    positions: Tensor
    context: Tensor
    mask: Tensor
    causal: bool = False

    def places(self, width: int) -> Tensor:
        """The positions of all rows of blocks of this width, int64 [B, A, width]."""
        return self.positions[..., None] + torch.arange(width, device=self.positions.device)


def block_attention(q: Tensor, near: Kv, far: Kv, view: BlockView) -> Tensor:
    """q [B, A, W, heads, dim] over the blocks' own rows `near` [B, A, W, KV heads, dim] and the pairs
    `far` [B, T, KV heads, dim]: [B, A, W, heads, dim].
    """
    groups = q.shape[3] // near[0].shape[3]
    (k, v), (keys, values) = (tuple(part.repeat_interleave(groups, -2) for part in kv) for kv in (near, far))
    pairs = torch.einsum("bawhd,bthd->bahwt", q, keys)
    pairs = pairs.masked_fill(~view.mask[:, :, None, None], -torch.inf)
    own = torch.einsum("bawhd,bauhd->bahwu", q, k)
    if view.causal:
        own = own.masked_fill(own.new_ones(own.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    scores = torch.cat((pairs, own), -1).float() * q.shape[-1] ** -0.5
    weights = scores.softmax(-1).to(v.dtype).split((pairs.shape[-1], own.shape[-1]), -1)
    seen = torch.einsum("bahwt,bthd->bawhd", weights[0], values)
    return seen + torch.einsum("bahwu,bauhd->bawhd", weights[1], v)
