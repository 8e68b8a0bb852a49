"""Attention as a table: a token's query over the tokens of its path, in any batch, chunk or tree it runs in.

A path is a list of token ids; an id has its own random key, value and query. So any two queries with the same
path must give the same bits, wherever their rows lie. What no query may read is NaN. Results are compared in
float32: rounded to 16 bits, one in a thousand that differ would still show it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from eyas.engine.batch.tables import mask_words
from eyas.engine.kernels.attention.attend import QueryRows
from eyas.engine.kernels.attention.exact_attend import AttentionCut, ExactLaunch
from eyas.engine.kernels.attention.exact_parts import PartSizes
from eyas.engine.kernels.attention.exact_paths import attend_exactly
from eyas.engine.kernels.attention.exact_prefill import ChunkCut, attend_chunks_exactly
from eyas.engine.kernels.attention.paged import PagedKv
from eyas.engine.kernels.attention.prefill import tile_rows
from eyas.engine.kernels.attention.scores import ScoreScaling

PAGE = 16
Path = tuple[int, ...]
Bits = Mapping[Hashable, torch.Tensor]


@dataclass(frozen=True)
class Tree:
    """Nodes behind a trunk, each with its parent among them, -1 for a root, and its id."""

    trunk: Path
    parents: tuple[int, ...]
    ids: tuple[int, ...]

    def ancestors(self, node: int) -> list[int]:
        """A node's path within the tree, its own place last."""
        parent = self.parents[node]
        return [*(self.ancestors(parent) if parent >= 0 else []), node]

    def path(self, node: int) -> Path:
        """All ids that a node sees."""
        return (*self.trunk, *(self.ids[i] for i in self.ancestors(node)))


class Tokens:
    """Ids, with what attention needs of each: scores spread, so that some keys weigh little."""

    def __init__(self, count: int, heads: tuple[int, int, int], device: str, dtype: torch.dtype) -> None:
        """heads: of queries, of keys, and values of each."""
        random = torch.Generator().manual_seed(count)
        many, few, self.dim = heads
        self.heads, self.device, self.rule = many, device, ScoreScaling(self.dim**-0.5)
        self.q = torch.randn(count, many, self.dim, generator=random).mul(2).to(device, dtype)
        self.kv = torch.randn(count, 2, few, self.dim, generator=random).to(device, dtype)
        self._random = random

    def laid(self, sequences: Sequence[Sequence[int]]) -> PagedKv:
        """A pool in which these lie on scattered pages, each in its slot."""
        counts = [-(-len(ids) // PAGE) for ids in sequences]
        order = torch.randperm(sum(counts), generator=self._random) + 1
        pool = torch.full((1 + sum(counts), 2, 2, PAGE, *self.kv.shape[2:]), float("nan"))
        pool = pool.to(self.kv.dtype).to(self.device)
        tables = torch.zeros(len(sequences), max(counts) + 1, dtype=torch.int32)
        for slot, (ids, pages) in enumerate(zip(sequences, order.split(counts), strict=True)):
            tables[slot, : len(pages)] = pages.int()
            row = torch.arange(len(ids))
            pool[pages[row // PAGE], 1, :, row % PAGE] = self.kv[torch.tensor(list(ids))]
        return PagedKv(pool[:, 1], tables.to(self.device), self.rule)

    def expected(self, path: Path) -> torch.Tensor:
        """A plain softmax of the last token's query over its path, in float64 [heads, dim]."""
        seen, rule = list(path[-self.rule.window :]), self.rule
        if rule.chunk:
            seen = list(path[(len(path) - 1) // rule.chunk * rule.chunk :])
        k, v = self.kv[seen].double().repeat_interleave(self.heads // self.kv.shape[2], 2).unbind(1)
        scores = torch.einsum("hd,khd->hk", self.q[path[-1]].double(), k) * rule.scale
        if rule.soft_cap:
            scores = (scores / rule.soft_cap).tanh() * rule.soft_cap
        if rule.sinks is not None:  # a key that has no value
            scores = torch.cat((scores, rule.sinks.double()[:, None]), 1)
            v = torch.cat((v, torch.zeros_like(v[:1])))
        return torch.einsum("hk,khd->hd", scores.softmax(-1), v)

    def ints(self, *values: int) -> torch.Tensor:
        """int32 on the device."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)


class Exact:
    """The exact kernels, cut in one way, with any queries."""

    def __init__(self, tokens: Tokens, parts: PartSizes, cut: AttentionCut | None = None) -> None:
        self._tokens, self._parts, self._cut = tokens, parts, cut

    def rows(self, paths: Sequence[Path], width: int = 1) -> Bits:
        """The last `width` tokens of each path, all in one batch."""
        kv = self._tokens.laid(paths)
        starts = self._tokens.ints(*(len(path) - width for path in paths))
        queries = QueryRows(self._tokens.ints(*range(len(paths))), starts, width)
        asked = [path[: len(path) - width + j + 1] for path in paths for j in range(width)]
        return self._kept(asked, self._attend(kv, queries, asked))

    def trees(self, trees: Sequence[Tree]) -> Bits:
        """All nodes of trees of one size."""
        kv, width = self._tokens.laid([(*tree.trunk, *tree.ids) for tree in trees]), len(trees[0].ids)
        mask = torch.zeros(mask_words(width), len(trees), width, dtype=torch.int64)
        for b, tree in enumerate(trees):
            for node in range(width):
                for seen in tree.ancestors(node):
                    mask[seen // 64, b, node] |= 1 << seen % 64 if seen % 64 < 63 else -(2**63)
        starts = self._tokens.ints(*(len(tree.trunk) for tree in trees))
        queries = QueryRows(
            self._tokens.ints(*range(len(trees))), starts, width, mask.to(self._tokens.device)
        )
        asked = [tree.path(node) for tree in trees for node in range(width)]
        return self._kept(asked, self._attend(kv, queries, asked))

    def chunks(self, chunks: Sequence[tuple[Path, int]], rows: int = 0) -> Bits:
        """The tokens of each path from its number on, which is where the chunk begins. `rows`: of a program,
        of which a tile then has several.
        """
        kv, tokens = self._tokens.laid([path for path, _ in chunks]), self._tokens
        cut = ChunkCut(parts=self._parts) if rows == 0 else ChunkCut(rows, 4, 2, self._parts)
        most = tile_rows(tokens.heads, kv.kv_heads)
        tiles, asked = [], []
        for slot, (path, start) in enumerate(chunks):
            for at in range(start, len(path), most):
                count = min(most, len(path) - at)
                tiles.append((slot, len(asked), at, count))
                asked += [path[: at + i + 1] for i in range(count)]
        tiles_there = torch.tensor([*tiles, (0, 0, 0, 0)], dtype=torch.int32, device=tokens.device)
        q = self._asking(asked)
        return self._kept(asked, attend_chunks_exactly(q, kv, tiles_there, cut, out=wide(q)))

    def _attend(self, kv: PagedKv, queries: QueryRows, asked: Sequence[Path]) -> torch.Tensor:
        launch = ExactLaunch.on(kv, self._tokens.heads, len(asked), pdl=False, parts=self._parts)
        for left in (launch.accs, launch.peaks, launch.totals):
            left.fill_(float("nan"))
        q = self._asking(asked)
        first, again = (attend_exactly(q, kv, queries, launch, self._cut, wide(q)) for _ in range(2))
        assert torch.equal(first, again) and not launch.tickets.any()
        return first

    def _asking(self, asked: Iterable[Path]) -> torch.Tensor:
        return self._tokens.q[[path[-1] for path in asked]]

    @staticmethod
    def _kept(asked: Sequence[Path], out: torch.Tensor) -> Bits:
        return {(len(path), hash(path)): row for path, row in zip(asked, out, strict=True)}


def wide(q: torch.Tensor) -> torch.Tensor:
    """Room for results that are not rounded to the queries' type."""
    return torch.empty(q.shape, dtype=torch.float32, device=q.device)


def ruled(tokens: Tokens, rule: ScoreScaling) -> Tokens:
    """The same tokens under another layer's rule."""
    other = Tokens.__new__(Tokens)
    other.__dict__.update(tokens.__dict__, rule=rule)
    return other


def branching(trunk: Path, spine: Sequence[int], others: Sequence[int]) -> Tree:
    """A tree whose spine stands among its others, each a sibling of the spine's next node."""
    parents, ids, last = [], [], -1
    for ahead, other in zip(spine, others, strict=True):
        parents += [last, last]
        ids += [other, ahead]
        last = len(ids) - 1
    return Tree(trunk, tuple(parents), tuple(ids))
