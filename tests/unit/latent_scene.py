"""Rows and pages of latents for the attention kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from eyas.engine.kernels.attention.scores import ScoreScaling
from tests.unit.attention_scene import DEVICE, PAGE, scattered

EPS = 1e-6
LATENT, ROTATED = 32, 16
SCALE = 0.21


class LatentScene:
    """Sequences of given lengths on scattered pages; what no sequence may read is NaN."""

    def __init__(self, heads: int, ends: list[int]) -> None:
        torch.set_num_threads(1)  # many test processes share the cores
        self.random = torch.Generator().manual_seed(len(ends) + heads)
        self.heads = heads
        self.kv = replace(scattered(ends, (1, 1, LATENT + ROTATED), self.random), scores=ScoreScaling(SCALE))

    def normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=self.random)

    def queries(self, rows: int) -> torch.Tensor:
        return self.normal(rows, self.heads, LATENT + ROTATED).to(DEVICE)

    def expected(self, q: torch.Tensor, slot: int, seen: list[int], scale: float = SCALE) -> torch.Tensor:
        """One query row [heads, width] over the logical rows `seen`, in float64: [heads, latent]."""
        rows = torch.tensor(seen, device=DEVICE)
        page, place = self.kv.tables[slot, rows // PAGE].long(), rows % PAGE
        kept = self.kv.pool[page, 0, place, 0].double()
        scores = torch.einsum("hd,kd->hk", q.double(), kept) * scale
        return torch.einsum("hk,kd->hd", scores.softmax(-1), kept[:, :LATENT])
