"""Cases of attention on a GPU, and a pool of random rows for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from eyas.bench.kernels.attention import ancestors
from eyas.engine.kernels.attention.attend import AttentionLaunch, QueryRows
from eyas.engine.kernels.attention.paged import PagedKv

HEADS, KV_HEADS, DIM, PAGE, LAYERS = 32, 8, 128, 16, 16
_MOST_PARTS = 16
BATCH = 128
_POOL_ROWS = 600_000  # 39 GB in 16 layers
_LONGEST = 8192 + 64


@dataclass(frozen=True)
class Case:
    """Sequences of these lengths without their `width` query rows."""

    name: str
    lengths: tuple[int, ...]
    width: int = 1
    tree: bool = False


@dataclass(frozen=True)
class Prompt:
    """Chunks of (prefix, count)."""

    name: str
    chunks: tuple[tuple[int, int], ...]


class Pool:
    """Random keys and values of 16 layers, and page tables that scatter every sequence over all of them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        pages = _POOL_ROWS // PAGE
        self._pool = torch.empty(pages, LAYERS, 2, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        self._pool.normal_()
        self._pages = torch.randperm(pages, device="cuda").int()
        self._tables = torch.zeros(2 * BATCH, _LONGEST // PAGE, dtype=torch.int32, device="cuda")

    def layer(self, index: int) -> PagedKv:
        return PagedKv(self._pool[:, index % LAYERS], self._tables)

    def launch(self, cases: Sequence[Case]) -> AttentionLaunch:
        """With room for any cut of these cases."""
        heads = HEADS * max(len(case.lengths) * case.width for case in cases)
        launch = AttentionLaunch.on(self.layer(0), HEADS, batch=1, width=1, pdl=True)
        return replace(
            launch,
            parts=torch.empty(_MOST_PARTS * heads, DIM, device="cuda"),
            lses=torch.empty(_MOST_PARTS * heads, device="cuda"),
            tickets=torch.zeros(heads, dtype=torch.int32, device="cuda"),
        )

    def seat(self, ends: Sequence[int]) -> None:
        """Gives slot i pages for ends[i] rows."""
        taken = 0
        for slot, end in enumerate(ends):
            count = -(-end // PAGE)
            self._tables[slot, :count] = self._pages[taken : taken + count]
            taken += count


def queries_of(case: Case, first_slot: int) -> QueryRows:
    """A tree is binary, its nodes in order of depth."""
    batch = len(case.lengths)
    return QueryRows(
        slots=torch.arange(batch, dtype=torch.int32, device="cuda") + first_slot,
        starts=torch.tensor(case.lengths, dtype=torch.int32, device="cuda"),
        width=case.width,
        mask=torch.tensor([[ancestors(case.width)] * batch], device="cuda") if case.tree else None,
    )
