"""Rows, pages and masks for the attention kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from eyas.engine.kernels.attention.paged import PagedKv
from eyas.engine.kernels.attention.scores import ScoreScaling

PAGE = 16
LAYER = 1
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Scene:
    """Sequences of given lengths on scattered pages; what no sequence may read is NaN."""

    def __init__(self, heads: int, kv_heads: int, dim: int, ends: list[int]) -> None:
        torch.set_num_threads(1)  # many test processes share the cores
        self.random = torch.Generator().manual_seed(len(ends) + dim)
        self.heads, self.group, self.dim = heads, heads // kv_heads, dim
        self.kv = scattered(ends, (2, kv_heads, dim), self.random)

    def normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=self.random)

    def queries(self, rows: int) -> torch.Tensor:
        """[rows, heads, dim] as they lie beside keys and values in one product's result."""
        return self.normal(rows, self.heads + 2, self.dim).to(DEVICE)[:, : self.heads]

    def ruled(self, rule: ScoreScaling, firsts: list[int] | None = None) -> None:
        """From now on; what lies below a slot's first row is NaN."""
        bounds = None if firsts is None else int32(*firsts)
        self.kv = replace(self.kv, scores=rule, firsts=bounds)
        for slot, first in enumerate(firsts or []):
            self.poison(slot, first)

    def poison(self, slot: int, end: int) -> None:
        """Rows below `end` become NaN: what reads them shows."""
        for row in range(end):
            self.kv.pool[self.kv.tables[slot, row // PAGE], :, row % PAGE] = float("nan")

    def seen(self, slot: int, path: list[int]) -> list[int]:
        """The rows of a path that its last one sees."""
        first = 0 if self.kv.firsts is None else int(self.kv.firsts[slot])
        if chunk := self.kv.rule.chunk:
            first = max(first, (len(path) - 1) // chunk * chunk)
        return [row for row in path[-self.kv.rule.window :] if row >= first]

    def expected(self, q: torch.Tensor, slot: int, seen: list[int]) -> torch.Tensor:
        """One query row [heads, dim] over the logical rows `seen`, in float64."""
        rows = torch.tensor(seen, device=DEVICE)
        page, place = self.kv.tables[slot, rows // PAGE].long(), rows % PAGE
        k, v = (
            self.kv.pool[page, which, place].double().repeat_interleave(self.group, 1) for which in (0, 1)
        )
        rule = self.kv.rule
        scores = torch.einsum("hd,khd->hk", q.double(), k) * rule.scale
        if rule.soft_cap:
            scores = (scores / rule.soft_cap).tanh() * rule.soft_cap
        if rule.sinks is not None:  # a key that has no value
            scores = torch.cat((scores, rule.sinks.double()[:, None]), 1)
            v = torch.cat((v, torch.zeros_like(v[:1])))
        return torch.einsum("hk,khd->hd", scores.softmax(-1), v)


def scattered(ends: list[int], row: tuple[int, int, int], random: torch.Generator) -> PagedKv:
    """Random rows (keys and values or one of them, heads, dim) of sequences of these lengths, on pages in any
    order. Page 0 is zeros, and what no sequence has is NaN.
    """
    kinds, heads, dim = row
    counts = [-(-end // PAGE) for end in ends]
    pages = 1 + sum(counts)
    pool = torch.full((pages, 3, kinds, PAGE, heads, dim), float("nan"))
    pool[0] = 0.0
    free = (torch.randperm(pages - 1, generator=random) + 1).tolist()
    tables = torch.zeros(len(ends) + 1, max(counts) + 1, dtype=torch.int32)  # the last slot has no pages
    for slot, (end, count) in enumerate(zip(ends, counts, strict=True)):
        table, free = free[:count], free[count:]
        tables[slot, :count] = torch.tensor(table)
        for at in range(end):
            pool[table[at // PAGE], LAYER, :, at % PAGE] = torch.randn(row, generator=random)
    return PagedKv(pool.to(DEVICE)[:, LAYER], tables.to(DEVICE))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def positions(ends: list[int], order: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return int32(*order), int32(*(ends[slot] - width for slot in order))


def parents_mask(parents: list[int]) -> list[int]:
    """What each node sees: itself and its ancestors; -1: it has no parent."""
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
    return masks
