"""The parts of a Llama's layer on PyTorch's own operations, as draft heads are trained of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaShape:
    """The shape of a Llama, or of a draft head's one layer; the defaults are those of the embedded model.

    `qkv_bias`: queries, keys and values have biases.
    """

    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 656
    vocab: int = 4096
    context: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qkv_bias: bool = False

    @property
    def captured(self) -> tuple[int, int, int]:
        """The layers whose inputs the draft head reads: low, middle, high."""
        return 2, self.layers // 2, self.layers - 3


def rope_table(config: LlamaShape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines for these positions: float32 [..., head_dim]."""
    half = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() / config.rope_theta ** (half / config.head_dim)
    return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """The rotary embedding of x [batch, heads, length, head_dim], in the halves convention."""
    low, high = x.chunk(2, -1)
    return (x * rope[0] + torch.cat((-high, low), -1) * rope[1]).to(x.dtype)


class TrainedNorm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class KvCache:
    """Keys and values of every layer: [layers, batch, kv_heads, length, head_dim]."""

    def __init__(self, config: LlamaShape, batch: int, length: int, like: Tensor) -> None:
        shape = (config.layers, batch, config.kv_heads, length, config.head_dim)
        self.keys = torch.zeros(shape, device=like.device, dtype=like.dtype)
        self.values = torch.zeros_like(self.keys)

    def keep(self, rows: Tensor) -> None:
        """Keeps only these rows of the batch."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores keys and values from column `start` on; returns all columns up to the last one stored."""
        stop = start + key.shape[2]
        self.keys[layer, :, :, start:stop] = key
        self.values[layer, :, :, start:stop] = value
        return self.keys[layer, :, :, :stop], self.values[layer, :, :, :stop]


@dataclass(frozen=True)
class CacheView:
    """The rows that one forward pass writes, and the columns that each row sees."""

    cache: KvCache
    start: int
    mask: Tensor


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of q [batch, heads, rows, dim] over k, v [batch, kv_heads, columns, dim], without copies.

    `mask` bool [batch or 1, rows, columns] is true where a row sees a column.
    """
    batch, heads, rows, dim = q.shape
    groups = heads // k.shape[1]
    q = q.reshape(batch, k.shape[1], groups * rows, dim)
    scores = (q @ k.transpose(-1, -2)).float() * dim**-0.5
    scores = scores.unflatten(2, (groups, rows)).masked_fill(~mask[:, None, None], -torch.inf)
    weights = scores.softmax(-1).to(v.dtype).flatten(2, 3)
    weighted: Tensor = weights @ v
    return weighted.view(batch, heads, rows, dim)


class GroupedAttention(nn.Module):
    """Grouped-query attention. `width`: the width of the input, which is doubled in a draft head."""

    def __init__(self, config: LlamaShape, width: int) -> None:
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(width, config.heads * config.head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, config.kv_heads * config.head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, config.kv_heads * config.head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries, rotated keys, and values, each [batch, its heads, length, head_dim]."""
        batch, length = x.shape[:2]
        q, k, v = (
            layer(x).view(batch, length, -1, self.config.head_dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(q, rope), rotate(k, rope), v

    def join(self, x: Tensor) -> Tensor:
        """Concatenates the heads and applies the output projection: [batch, length, hidden]."""
        joined: Tensor = self.o_proj(x.transpose(1, 2).flatten(2))
        return joined

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, view: CacheView | None) -> Tensor:
        """Causal attention over the sequence, or over the columns of the cache that `view` shows."""
        q, k, v = self.project(x, rope)
        if view is None:
            return self.join(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        k, v = view.cache.write(layer, view.start, k, v)
        return self.join(grouped_attention(q, k, v, view.mask))


class SwigluMlp(nn.Module):
    """A SwiGLU feed-forward block."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> [..., hidden]."""
        lowered: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return lowered
