"""Attention in plain torch operations: the specification that every other backend is held to.

Batch-invariant: a row's result has the same bits whether it is computed alone, in a batch, in a prefill
chunk, in a chain or as a tree node. Keys are taken in blocks of 64 along the query's own path; a *tile* of
up to 8 rows of one key head meets a block in a matrix product of one fixed shape; the blocks' sums are added
in path order. The softmax's maximum is exact in any order, and a block that a row does not see adds
exact zeros, so neither tile mates nor their longer paths leave a trace. Blocks are cut at multiples of 64 of
the path, whatever the window: a layer with one leaves out the blocks that none of a tile's rows sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch

from eyas.engine.attention.base import AttentionBackend, Plan
from eyas.engine.attention.soft_cap import soft_cap
from eyas.engine.batch.blocks import padded_rows
from eyas.engine.batch.spans import Span
from eyas.engine.checkpoint.config import AttentionSpec, ModelConfig
from eyas.engine.ipc.pulse import Beat, no_pulse
from eyas.engine.kv.pool import PoolShape, rows_at

BLOCK = 64
_TILES_SHARING_KEYS = 4  # a causal span of more tiles gathers its keys once for all of them
_GATHER_BYTES = 1 << 25  # bound on the keys and values copied for one part of a plan


@dataclass(frozen=True)
class _Tile:
    """Queries row .. row + count - 1 of a step; the first stands after `visible` keys, each later one more.

    Key j of the path is logical row j below `straight`, else tail[j - straight]. `first`: the first block
    with a key that one of them sees.
    """

    pages: Sequence[int]
    row: int
    count: int
    visible: int
    straight: int
    tail: tuple[int, ...] = ()
    first: int = 0

    @property
    def keys(self) -> int:
        return self.visible + self.count - 1

    @property
    def blocks(self) -> int:
        return -(-self.keys // BLOCK) - self.first


@dataclass(frozen=True)
class _Group:
    """Tiles computed together: `pairs` (tile, block) pairs over as many blocks of a part's keys.

    `at`: the first of these blocks, counted in the part. `counts`: how many tiles have a first block, a
    second one and so on; those that have more blocks come first.
    """

    at: int
    pairs: int
    counts: tuple[int, ...]
    queries: torch.Tensor  # int64 [pairs * kv_heads * tile rows], into q viewed as [R * heads, dim]
    mask: torch.Tensor  # float32 [pairs * kv_heads, tile rows, BLOCK]: 0 or -inf
    tile_of: torch.Tensor  # int64 [pairs]: ascending for the first blocks, then for the second ones...


@dataclass(frozen=True)
class _Part:
    """Keys and values gathered once, and the groups that read them."""

    gather: torch.Tensor  # int64 [fields * blocks * kv_heads * BLOCK], into a layer viewed as rows of [dim]
    blocks: torch.Tensor | None  # int64 [pairs]: which of these blocks each pair has; None: its own
    groups: tuple[_Group, ...]


class Sight(NamedTuple):
    """Which keys a layer's queries see: `window` and `unseen` of its `AttentionSpec`."""

    window: int
    unseen: int

    @classmethod
    def of(cls, spec: AttentionSpec) -> Self:
        """A layer's."""
        return cls(spec.window, spec.unseen)


@dataclass(frozen=True)
class _View:
    """What rows see by one sight."""

    parts: tuple[_Part, ...]
    rows: torch.Tensor  # int64 [padded R * heads]: where each query head's result is among the tiles'


@dataclass(frozen=True)
class TorchPlan(Plan):
    """`views`: one for each sight that a layer has."""

    views: Mapping[Sight, _View]


class TorchAttention(AttentionBackend):
    """For `heads` query heads over a pool of the given shape; computes in float32 wherever the pool is.

    `sights`: those of the layers that will `run`. `beat`: is called after every part of a layer.
    """

    def __init__(
        self,
        heads: int,
        shape: PoolShape,
        sights: Iterable[Sight] = (Sight(0, 0),),
        beat: Beat = no_pulse,
    ) -> None:
        self._heads = heads
        self._shape = shape
        self._sights = frozenset(sights)
        self._beat = beat
        self._group = heads // shape.kv_heads
        self._tile_rows = padded_rows(self._group)
        self._queries = self._tile_rows // self._group
        self.device = shape.device

    @classmethod
    def of(cls, config: ModelConfig, shape: PoolShape, beat: Beat = no_pulse) -> Self:
        """For all layers of a decoder."""
        return cls(config.num_heads, shape, {Sight.of(layer.attention) for layer in config.layers}, beat)

    def plan(self, spans: Sequence[Span]) -> TorchPlan:
        return TorchPlan({sight: self._view(spans, sight) for sight in self._sights})

    def _view(self, spans: Sequence[Span], sight: Sight) -> _View:
        parts, order = [], []
        short: list[_Tile] = []
        row = 0
        for span in spans:
            tiles = [_seen(tile, sight.window) for tile in self._tiles(span, row)]
            row += span.count
            if span.paths is None and len(tiles) > _TILES_SHARING_KEYS:
                parts.append(self._shared_part(tiles, sight))
                order += tiles
            else:
                short += tiles
        for batch in self._batches(short):
            self._beat()
            batch.sort(key=lambda tile: -tile.blocks)
            parts.append(self._batched_part(batch, sight))
            order += batch
        return _View(tuple(parts), self._result_rows(order, row))

    def run(self, q: torch.Tensor, layer_pool: torch.Tensor, plan: Plan, spec: AttentionSpec) -> torch.Tensor:
        assert isinstance(plan, TorchPlan)
        view, dim, kv_heads = plan.views[Sight.of(spec)], self._shape.head_dim, self._shape.kv_heads
        fields, value_dim = self._shape.fields, self._shape.format.value_dim
        rows = self._as_rows(layer_pool)
        q_rows = q.reshape(-1, dim).float()
        results = []
        for part in view.parts:
            gathered = rows_at(rows, part.gather, torch.float32)
            if part.blocks is not None:
                gathered = gathered.view(fields, -1, kv_heads * BLOCK * dim).index_select(1, part.blocks)
            gathered = gathered.view(fields, -1, BLOCK, dim)
            for group in part.groups:
                self._beat()
                seen = gathered[:, group.at * kv_heads : (group.at + group.pairs) * kv_heads]
                results.append(self._attend(q_rows, seen, group, spec))
        found = results[0] if len(results) == 1 else torch.cat(results)
        found = found.index_select(0, view.rows[: q_rows.shape[0]])
        return found.view(*q.shape[:-1], value_dim).to(q.dtype)

    def _as_rows(self, layer_pool: torch.Tensor) -> torch.Tensor:
        """The memory of one layer's view, and what lies between its pages, as rows of [dim]."""
        shape = self._shape
        page = shape.fields * shape.page_size * shape.kv_heads  # rows of one layer of one page
        rows = ((shape.pages - 1) * shape.layers + 1) * page
        return layer_pool.as_strided((rows, shape.head_dim), (shape.head_dim, 1))

    def _attend(
        self, q_rows: torch.Tensor, seen: torch.Tensor, group: _Group, spec: AttentionSpec
    ) -> torch.Tensor:
        """`seen` [fields, pairs * kv_heads, BLOCK, dim] -> [tiles * kv_heads * tile rows, value dim]."""
        dim, value_dim = self._shape.head_dim, self._shape.format.value_dim
        keys, values = seen[0], seen[-1][..., :value_dim]
        queries = q_rows.index_select(0, group.queries).view(-1, self._tile_rows, dim)
        if spec.soft_cap:
            raw = torch.bmm(queries, keys.transpose(1, 2)).mul_(spec.scale)
            scores = soft_cap(raw, spec.soft_cap).add_(group.mask)
        else:
            scores = torch.baddbmm(group.mask, queries, keys.transpose(1, 2), alpha=spec.scale)
        peaks = scores.amax(-1).view(group.pairs, -1)
        peak = _fold(torch.maximum, peaks[: group.counts[0]].clone(), peaks, group.counts)
        weights = scores.sub_(peak.index_select(0, group.tile_of).view(-1, self._tile_rows, 1)).exp_()
        total = _fold(torch.add, torch.zeros_like(peak), weights.sum(-1).view_as(peaks), group.counts)
        mixed = torch.bmm(weights, values).view(group.pairs, -1)
        zeros = mixed.new_zeros(group.counts[0], mixed.shape[1])
        result = _fold(torch.add, zeros, mixed, group.counts)
        return result.view(-1, value_dim).div_(total.view(-1, 1))

    def _tiles(self, span: Span, row: int) -> Iterator[_Tile]:
        if span.paths is not None:
            for i, path in enumerate(span.paths):
                yield _Tile(span.pages, row + i, 1, span.start + len(path), span.start, path)
            return
        for i in range(0, span.count, self._queries):
            count = min(self._queries, span.count - i)
            first = span.start + i + 1
            yield _Tile(span.pages, row + i, count, first, first + count - 1)

    def _batches(self, tiles: Sequence[_Tile]) -> Iterator[list[_Tile]]:
        """Cuts tiles into runs whose gathered keys stay under the bound (a tile is never cut)."""
        shape = self._shape
        each = shape.fields * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
        budget = _GATHER_BYTES // (BLOCK * each)
        batch: list[_Tile] = []
        blocks = 0
        for tile in tiles:
            if batch and blocks + tile.blocks > budget:
                yield batch
                batch, blocks = [], 0
            batch.append(tile)
            blocks += tile.blocks
        if batch:
            yield batch

    def _batched_part(self, tiles: Sequence[_Tile], sight: Sight) -> _Part:
        """Every tile brings its own keys; all are computed at once."""
        return _Part(*self._gather(tiles), (self._group_of(tiles, sight),))

    def _shared_part(self, tiles: Sequence[_Tile], sight: Sight) -> _Part:
        """Tiles of one causal span: each reads some of the keys from the first one's first to the last's."""
        first = tiles[0].first
        groups = tuple(self._group_of([tile], sight, at=tile.first - first) for tile in tiles)
        return _Part(*self._gather([replace(tiles[-1], first=first)]), groups)

    def _gather(self, tiles: Sequence[_Tile]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A part's `gather`, where the fields of the tiles' blocks are, and `blocks`."""
        shape, size = self._shape, self._shape.page_size
        tile_of, block_of = _pairs(tiles)
        blocks = None
        firsts, same = _shared(tiles, tile_of, block_of)
        if len(firsts) < len(same):  # as in a tree, whose nodes have all but their last blocks in common
            tile_of, block_of, blocks = tile_of[firsts], block_of[firsts], self._tensor(same)
        # A key that no query sees is replaced by the path's last: masked garbage might not be finite.
        path = np.minimum(block_of[:, None] * BLOCK + np.arange(BLOCK), _column(tiles, "keys")[tile_of] - 1)
        if any(tile.tail for tile in tiles):
            path = _along_tails(tiles, tile_of, path)
        tables = np.zeros((len(tiles), max(len(tile.pages) for tile in tiles)), np.int64)
        for table, tile in zip(tables, tiles, strict=True):
            table[: len(tile.pages)] = tile.pages
        page, slot = tables[tile_of[:, None], path // size], path % size
        rows = (page * (shape.layers * shape.fields * size) + slot) * shape.kv_heads
        heads = rows[:, None, :] + np.arange(shape.kv_heads)[:, None]  # [pairs, kv_heads, BLOCK]
        fields = [heads + field * size * shape.kv_heads for field in range(shape.fields)]
        return self._tensor(np.stack(fields).reshape(-1)), blocks

    def _group_of(self, tiles: Sequence[_Tile], sight: Sight, at: int = 0) -> _Group:
        """A tile's matrix row m is query min(m // group, count - 1), query head m % group of the key head."""
        tile_of, block_of = _pairs(tiles)
        blocks = np.array([tile.blocks for tile in tiles])
        query = np.minimum(np.arange(self._tile_rows) // self._group, _column(tiles, "count") - 1)
        head = np.arange(self._tile_rows) % self._group
        heads = np.arange(self._shape.kv_heads)[:, None] * self._group + head  # [kv_heads, tile rows]
        queries = ((_column(tiles, "row") + query) * self._heads)[:, None, :] + heads
        visible = _column(tiles, "visible") + query  # [tiles, tile rows]
        key = block_of[:, None, None] * BLOCK + np.arange(BLOCK)
        after = key - visible[tile_of][:, :, None]  # below 0: the row's own key, and those before it
        sees = after < 0 if not sight.window else (after < 0) & (after >= -sight.window)
        if sight.unseen:
            sees &= (key >= sight.unseen) | (after == -1)
        mask = np.where(sees, np.float32(0), np.float32(-np.inf))
        return _Group(
            at=at,
            pairs=len(tile_of),
            counts=tuple((blocks > step).sum().item() for step in range(blocks.max())),
            queries=self._tensor(queries[tile_of].reshape(-1)),
            mask=self._tensor(np.repeat(mask, self._shape.kv_heads, axis=0)),
            tile_of=self._tensor(tile_of),
        )

    def _result_rows(self, tiles: Sequence[_Tile], rows: int) -> torch.Tensor:
        kv_heads, group = self._shape.kv_heads, self._group
        heads = np.arange(self._heads)
        within = heads // group * self._tile_rows + heads % group
        found = np.zeros((padded_rows(rows), self._heads), np.int64)
        for i, tile in enumerate(tiles):
            query = np.arange(tile.count)[:, None]
            found[tile.row : tile.row + tile.count] = i * kv_heads * self._tile_rows + query * group + within
        return self._tensor(found.reshape(-1))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def _fold(
    fold: Callable[..., torch.Tensor], found: torch.Tensor, values: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    """`values` [pairs, n] of each tile folded into `found` [tiles, n], in the order of its blocks."""
    at = 0
    for count in counts:
        fold(found[:count], values[at : at + count], out=found[:count])
        at += count
    return found


def _pairs(tiles: Sequence[_Tile]) -> tuple[np.ndarray, np.ndarray]:
    """The (tile, block) pairs of `tiles`: the first block of each, the second of those that have one, and so
    on. Two int64 [pairs].
    """
    blocks, first = (np.array([getattr(tile, name) for tile in tiles]) for name in ("blocks", "first"))
    step, tile_of = np.nonzero(np.arange(blocks.max())[:, None] < blocks)
    return tile_of, step + first[tile_of]


def _shared(
    tiles: Sequence[_Tile], tile_of: np.ndarray, block_of: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A pair for each different block of keys, and for each pair which of these blocks it has.

    Tiles over the same pages have a block in common where none of them has its tail.
    """
    numbers: dict[int, int] = {}
    table = np.array([numbers.setdefault(id(tile.pages), len(numbers)) for tile in tiles])
    name = table[tile_of] * (block_of.max() + 1) + block_of
    straight = (block_of + 1) * BLOCK <= _column(tiles, "straight")[tile_of, 0]
    _, firsts, same = np.unique(
        np.where(straight, name, -1 - np.arange(len(name))), return_index=True, return_inverse=True
    )
    return firsts, same.reshape(-1)


def _seen(tile: _Tile, window: int) -> _Tile:
    """Without the blocks before its first query's window; 0: it sees all keys."""
    return replace(tile, first=max(tile.visible - window, 0) // BLOCK) if window else tile


def _column(tiles: Sequence[_Tile], name: str) -> np.ndarray:
    """One number a tile, int64 [tiles, 1]."""
    return np.array([[getattr(tile, name)] for tile in tiles])


def _along_tails(tiles: Sequence[_Tile], tile_of: np.ndarray, path: np.ndarray) -> np.ndarray:
    """Path places [pairs, BLOCK] turned into logical rows."""
    tails = np.zeros((len(tiles), max(len(tile.tail) for tile in tiles)), np.int64)
    for row, tile in zip(tails, tiles, strict=True):
        row[: len(tile.tail)] = tile.tail
    depth = path - _column(tiles, "straight")[tile_of]
    return np.where(depth < 0, path, tails[tile_of[:, None], np.maximum(depth, 0)])
