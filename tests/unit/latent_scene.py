"""Rows and pages of latents for the attention kernels."""

from __future__ import annotations

import torch

from eyas.engine.kernels.attention.paged import PagedKv
from eyas.engine.kernels.attention.scores import ScoreScaling

PAGE, LAYER, EPS = 16, 1, 1e-6
LATENT, ROTATED = 32, 16
SCALE = 0.21
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Scene:
    """Sequences of given lengths on scattered pages; what no sequence may read is NaN."""

    def __init__(self, heads: int, ends: list[int]) -> None:
        torch.set_num_threads(1)  # many test processes share the cores
        self.random = torch.Generator().manual_seed(len(ends) + heads)
        self.heads = heads
        counts = [-(-end // PAGE) for end in ends]
        pages = 1 + sum(counts)
        pool = torch.full((pages, 3, 1, PAGE, 1, LATENT + ROTATED), float("nan"))
        pool[0] = 0.0
        free = (torch.randperm(pages - 1, generator=self.random) + 1).tolist()
        tables = torch.zeros(len(ends) + 1, max(counts) + 1, dtype=torch.int32)  # the last slot has no pages
        for slot, (end, count) in enumerate(zip(ends, counts, strict=True)):
            table, free = free[:count], free[count:]
            tables[slot, :count] = torch.tensor(table)
            for row in range(end):
                pool[table[row // PAGE], LAYER, 0, row % PAGE, 0] = self.normal(LATENT + ROTATED)
        self.kv = PagedKv(pool.to(DEVICE)[:, LAYER], tables.to(DEVICE), ScoreScaling(SCALE))

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
