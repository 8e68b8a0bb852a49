"""Chooses the attention of a device's rows by what the pool keeps, and how it wants chunks cut into tiles."""

from __future__ import annotations

import torch

from eyas.engine.attention.latent import PagedLatents
from eyas.engine.attention.latent_prompts import ExpandedPrompts
from eyas.engine.attention.prompts import PromptAttention, PromptPlan
from eyas.engine.attention.rows import PagedAttention, RowLimits
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.kernels.attention.prefill import tile_rows
from eyas.engine.kernels.latent.latent_tiles import latent_tile_rows
from eyas.engine.kv.pool import PoolShape


def row_attention(
    tables: torch.Tensor,
    heads: int,
    shape: PoolShape,
    most: RowLimits,
    *,
    pdl: bool,
    prompts: PromptPlan | None = None,
) -> PagedAttention | PagedLatents:
    """The attention of `heads` query heads over a pool of that shape. `prompts`: of that form."""
    if shape.format.latent:
        expanded = prompts if isinstance(prompts, ExpandedPrompts) else None
        return PagedLatents(tables, heads, shape, most, pdl=pdl, prompts=expanded)
    planned = prompts if isinstance(prompts, PromptAttention) else None
    return PagedAttention(tables, heads, shape, most, pdl=pdl, prompts=planned)


def chunk_tile_rows(decoder: ModelConfig) -> int:
    """The most query rows of one tile of a chunk. `decoder`: one rank's share."""
    if decoder.kv_format.latent:
        return latent_tile_rows(decoder.num_heads)
    return max(tile_rows(decoder.num_heads, kv_heads) for kv_heads, _ in decoder.kinds_of_heads)
