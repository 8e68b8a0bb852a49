"""Latent attention as a table: a token's query over the tokens of its path, as `attention` has it of heads.

An id has its own random row and query. What no query may read is NaN, and so is scratch memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eyas.engine.batch.tables import mask_words
from eyas.engine.kernels.attention.attend import QueryRows
from eyas.engine.kernels.attention.exact_attend import ExactLaunch
from eyas.engine.kernels.attention.exact_parts import PartSizes
from eyas.engine.kernels.attention.paged import PagedKv
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kernels.latent.exact_latents import (
    MOST_SHARED,
    attend_latent_chunks_exactly,
    attend_latents_exactly,
)
from eyas.engine.kernels.latent.latent_tiles import latent_tile_rows
from tests.bits.attention import PAGE, Bits, Path, Tree


class Latents:
    """Ids, with the row and the query of each; results are not rounded."""

    def __init__(
        self, count: int, sizes: tuple[int, int, int], device: str, dtype: torch.dtype, parts: PartSizes
    ) -> None:
        """sizes: heads, elements of a latent, and of a rotated key."""
        self._random = torch.Generator().manual_seed(count)
        self._heads, self._latent, rotated = sizes
        width, self._device, self._parts = self._latent + rotated, device, parts
        self._q = torch.randn(count, self._heads, width, generator=self._random).to(device, dtype)
        self._kept = torch.randn(count, width, generator=self._random).to(device, dtype)
        self._rule = ScoreScaling(2.0 * width**-0.5)

    def rows(self, paths: Sequence[Path], width: int = 1) -> Bits:
        """The last `width` tokens of each path, all in one batch."""
        starts = self._ints(*(len(path) - width for path in paths))
        queries = QueryRows(self._ints(*range(len(paths))), starts, width)
        asked = [path[: len(path) - width + j + 1] for path in paths for j in range(width)]
        return self._decoded(self._laid(paths), queries, asked)

    def trees(self, trees: Sequence[Tree]) -> Bits:
        """All nodes of trees of one size."""
        kv, width = self._laid([(*tree.trunk, *tree.ids) for tree in trees]), len(trees[0].ids)
        mask = torch.zeros(mask_words(width), len(trees), width, dtype=torch.int64)
        for b, tree in enumerate(trees):
            for node in range(width):
                for seen in tree.ancestors(node):
                    mask[seen // 64, b, node] |= 1 << seen % 64 if seen % 64 < 63 else -(2**63)
        starts = self._ints(*(len(tree.trunk) for tree in trees))
        queries = QueryRows(self._ints(*range(len(trees))), starts, width, mask.to(self._device))
        return self._decoded(kv, queries, [tree.path(node) for tree in trees for node in range(width)])

    def chunks(self, chunks: Sequence[tuple[Path, int]]) -> Bits:
        """The tokens of each path from its number on, which is where the chunk begins."""
        kv, most = self._laid([path for path, _ in chunks]), latent_tile_rows(self._heads)
        tiles, asked = [], []
        for slot, (path, start) in enumerate(chunks):
            for at in range(start, len(path), most):
                count = min(most, len(path) - at)
                tiles.append((slot, len(asked), at, count))
                asked += [path[: at + i + 1] for i in range(count)]
        tiles_there = torch.tensor([*tiles, (0, 0, 0, 0)], dtype=torch.int32, device=self._device)
        out = self._room(asked)
        attend_latent_chunks_exactly(self._asking(asked), kv, tiles_there, out, self._parts)
        return self._kept_by(asked, out)

    def expected(self, path: Path) -> torch.Tensor:
        """A plain softmax of the last token's query over its path, in float64 [heads, latent]."""
        kept = self._kept[list(path)].double()
        scores = torch.einsum("hd,kd->hk", self._q[path[-1]].double(), kept) * self._rule.scale
        return torch.einsum("hk,kd->hd", scores.softmax(-1), kept[:, : self._latent])

    def _decoded(self, kv: PagedKv, queries: QueryRows, asked: Sequence[Path]) -> Bits:
        launch = ExactLaunch.on(kv, self._heads, len(asked), False, self._parts, shared=MOST_SHARED)
        for left in (launch.accs, launch.peaks, launch.totals):
            left.fill_(float("nan"))
        found = [self._room(asked), self._room(asked)]
        for out in found:
            attend_latents_exactly(self._asking(asked), kv, queries, launch, out)
        assert torch.equal(*found) and not launch.tickets.any()
        return self._kept_by(asked, found[0])

    def _laid(self, sequences: Sequence[Sequence[int]]) -> PagedKv:
        counts = [-(-len(ids) // PAGE) for ids in sequences]
        order = torch.randperm(sum(counts), generator=self._random) + 1
        pool = torch.full((1 + sum(counts), 2, 1, PAGE, 1, self._kept.shape[1]), float("nan"))
        pool = pool.to(self._kept.dtype).to(self._device)
        tables = torch.zeros(len(sequences), max(counts) + 1, dtype=torch.int32)
        for slot, (ids, pages) in enumerate(zip(sequences, order.split(counts), strict=True)):
            tables[slot, : len(pages)] = pages.int()
            row = torch.arange(len(ids))
            pool[pages[row // PAGE], 1, 0, row % PAGE, 0] = self._kept[torch.tensor(list(ids))]
        return PagedKv(pool[:, 1], tables.to(self._device), self._rule)

    def _asking(self, asked: Sequence[Path]) -> torch.Tensor:
        return self._q[[path[-1] for path in asked]]

    def _room(self, asked: Sequence[Path]) -> torch.Tensor:
        return torch.zeros(len(asked), self._heads, self._latent, device=self._device)

    def _ints(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)

    @staticmethod
    def _kept_by(asked: Sequence[Path], out: torch.Tensor) -> Bits:
        return {(len(path), hash(path)): row for path, row in zip(asked, out, strict=True)}
