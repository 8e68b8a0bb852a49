"""Attention in plain torch operations: the specification that every other backend is held to.

Batch-invariant: a row's result has the same bits whether it is computed alone, in a batch, in a prefill
chunk, in a chain or as a tree node. Keys are taken in blocks of 64 along the query's own path; a *tile* of
up to 8 rows of one key head meets a block in a matrix product of one fixed shape; the blocks' sums are added
in path order. The softmax's maximum is exact in any order, and a block that a row does not see adds
exact zeros, so neither tile mates nor their longer paths leave a trace. Blocks are cut at multiples of 64 of
the path, whatever the window: a layer with one leaves out the blocks that none of a tile's rows sees. The
nodes of a tree share tiles (*stems*) as far as their paths are the same, and each has one of its own for the
blocks after that (a *tip*).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, TypeVar

import numpy as np
import torch

from eyas.engine.attention.base import AttentionBackend, AttentionPlan
from eyas.engine.attention.soft_cap import soft_cap
from eyas.engine.batch.blocks import padded_rows
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import AttentionSpec, ModelConfig
from eyas.engine.ipc.pulse import Beat, no_pulse
from eyas.engine.kv.pool import PoolShape, rows_at
from eyas.engine.kv.scaled import scales_per_row

BLOCK = 64
_TILES_SHARING_KEYS = 4  # a causal span of more tiles gathers its keys once for all of them
_GATHER_BYTES = 1 << 25  # bound on the keys and values copied for one part of a plan


@dataclass(frozen=True)
class _QueryTile:
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


T = TypeVar("T", _QueryTile, "_TreeStem")


@dataclass(frozen=True)
class _TileGroup:
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
class _KeyGather:
    """Indices of the keys and values that are gathered together."""

    gather: torch.Tensor  # int64 [fields * blocks * kv_heads * BLOCK], into a layer viewed as rows of [dim]
    scales: torch.Tensor | None  # int64, as many, into a layer viewed as float32; None: there are none
    blocks: torch.Tensor | None  # int64 [pairs]: which of these blocks each pair has; None: its own


@dataclass(frozen=True)
class _KeyPart:
    """Keys and values gathered once, and the groups that read them."""

    keys: _KeyGather
    groups: tuple[_TileGroup, ...]


@dataclass(frozen=True)
class _TreePart:
    """Stems of trees, and the tips that go on from them."""

    stem_keys: _KeyGather
    stems: _TileGroup
    tip_keys: _KeyGather
    tips: _TileGroup
    stem_rows: (
        torch.Tensor
    )  # int64 [tips * kv_heads * tile rows]: the stems' row that each row of a tip goes on from
    tip_rows: (
        torch.Tensor
    )  # int64 [stems * kv_heads * tile rows]: the tips' row that goes on from a stem's row


@dataclass(frozen=True)
class _TreeStem:
    """A stem of a tree, up to a tile of its nodes: the blocks that all of them see, and their tips."""

    tile: _QueryTile
    tips: tuple[_QueryTile, ...]

    @property
    def blocks(self) -> int:
        return self.tile.blocks + sum(tip.blocks for tip in self.tips)


class KeyVisibility(NamedTuple):
    """The keys that a layer's queries see: `window`, `unseen` and `chunk` of its `AttentionSpec`."""

    window: int
    unseen: int
    chunk: int = 0

    @classmethod
    def of(cls, spec: AttentionSpec) -> Self:
        """The visibility of a layer's keys."""
        return cls(spec.window, spec.unseen, spec.chunk)


@dataclass(frozen=True)
class _VisibleParts:
    """The key parts that rows see by one sight, and the order of their results."""

    parts: tuple[_KeyPart | _TreePart, ...]
    rows: torch.Tensor  # int64 [padded R * heads]: where each query head's result is among the tiles'


@dataclass(frozen=True)
class TorchPlan(AttentionPlan):
    """`views`: one for each sight that a layer has."""

    views: Mapping[KeyVisibility, _VisibleParts]


class TorchAttention(AttentionBackend):
    """Attention of `heads` query heads over a pool of the given shape; computes in float32 wherever the pool
    is.

    `sights`: those of the layers that will `run`. `beat`: is called after every part of a layer.
    """

    def __init__(
        self,
        heads: int,
        shape: PoolShape,
        sights: Iterable[KeyVisibility] = (KeyVisibility(0, 0),),
        beat: Beat = no_pulse,
    ) -> None:
        self._heads = heads
        self._shape = shape
        self._sights = [frozenset(sights)]
        if shape.groups:
            sees = [(group.window, group.chunk) for group in shape.groups]
            self._sights = [
                frozenset(s for s in self._sights[0] if (s.window, s.chunk) == own) for own in sees
            ]
        self.groups = len(self._sights)
        self._beat = beat
        self._group = heads // shape.kv_heads
        self._tile_rows = padded_rows(self._group)
        self._queries = self._tile_rows // self._group
        self.device = shape.device

    @classmethod
    def of(cls, config: ModelConfig, shape: PoolShape, beat: Beat = no_pulse) -> Self:
        """Builds the attention for all layers of a decoder."""
        return cls(
            config.num_heads, shape, {KeyVisibility.of(layer.attention) for layer in config.layers}, beat
        )

    def plan(self, spans: Sequence[QuerySpan], group: int = 0) -> TorchPlan:
        return TorchPlan({sight: self._view(spans, sight) for sight in self._sights[group]})

    def _view(self, spans: Sequence[QuerySpan], sight: KeyVisibility) -> _VisibleParts:
        parts: list[_KeyPart | _TreePart] = []
        order: list[_QueryTile] = []
        short: list[_QueryTile] = []
        stems: list[_TreeStem] = []
        row = 0
        for span in spans:
            block = span.together and not sight.window
            tiles = [_seen(tile, sight) for tile in self._tiles(span, row, block)]
            row += span.count
            if span.paths is None and not block and len(tiles) > _TILES_SHARING_KEYS:
                parts.append(self._shared_part(tiles, sight))
                order += tiles
            elif span.paths is not None and (tree_stems := self._stems(span, tiles)):
                stems += tree_stems
            else:
                short += tiles
        for batch in self._batches(short):
            self._beat()
            batch.sort(key=lambda tile: -tile.blocks)
            parts.append(_KeyPart(self._keys(batch), (self._group_of(batch, sight),)))
            order += batch
        for together in self._batches(stems):
            self._beat()
            tips = sorted((tip for stem in together for tip in stem.tips), key=lambda tile: -tile.blocks)
            together.sort(key=lambda stem: -stem.tile.blocks)
            parts.append(self._tree_part(together, tips, sight))
            order += tips
        return _VisibleParts(tuple(parts), self._result_rows(order, row))

    def run(
        self,
        q: torch.Tensor,
        layer_pool: torch.Tensor,
        plan: AttentionPlan,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(plan, TorchPlan)
        view, kv_heads = plan.views[KeyVisibility.of(spec)], self._shape.kv_heads
        rows = self._as_rows(layer_pool)
        q_rows = q.reshape(-1, self._shape.head_dim).float()
        idle = None if sinks is None else self._of_tile(sinks)
        results = []
        for part in view.parts:
            if isinstance(part, _TreePart):
                self._beat()
                results.append(self._attend_tree(q_rows, rows, part, spec, idle))
                continue
            gathered = self._gathered(rows, part.keys)
            for group in part.groups:
                self._beat()
                seen = gathered[:, group.at * kv_heads : (group.at + group.pairs) * kv_heads]
                results.append(self._attend(q_rows, seen, group, spec, idle))
        output = results[0] if len(results) == 1 else torch.cat(results)
        output = output.index_select(0, view.rows[: q_rows.shape[0]])
        return output.view(*q.shape[:-1], self._shape.format.value_dim).to(q.dtype)

    def _gathered(self, rows: torch.Tensor, keys: _KeyGather) -> torch.Tensor:
        """-> [fields, pairs * kv_heads, BLOCK, dim] (blocks for pairs where each pair has its own)"""
        fields, dim = self._shape.fields, self._shape.head_dim
        gathered = rows_at(rows, keys.gather, torch.float32)
        if keys.scales is not None:
            scales = rows.view(torch.uint8).view(torch.float32).view(-1)
            gathered *= scales.index_select(0, keys.scales).unsqueeze(1)
        if keys.blocks is not None:
            whole = gathered.view(fields, -1, self._shape.kv_heads * BLOCK * dim)
            gathered = whole.index_select(1, keys.blocks)
        return gathered.view(fields, -1, BLOCK, dim)

    def _as_rows(self, layer_pool: torch.Tensor) -> torch.Tensor:
        """The memory of one layer's view, and what lies between its pages, as rows of [dim], which may be the
        first elements of heads' shares.
        """
        shape = self._shape
        page = shape.layer_rows * shape.kv_heads  # rows of one layer of one page
        rows = ((shape.pages - 1) * shape.layers + 1) * page
        return layer_pool.as_strided((rows, shape.head_dim), (layer_pool.stride(2) // shape.kv_heads, 1))

    def _of_tile(self, sinks: torch.Tensor) -> torch.Tensor:
        """The sinks [heads] of a tile's rows, [kv_heads * tile rows]."""
        head = torch.arange(self._tile_rows, device=sinks.device) % self._group
        return sinks.view(-1, self._group)[:, head].flatten()

    def _attend(
        self,
        q_rows: torch.Tensor,
        seen: torch.Tensor,
        group: _TileGroup,
        spec: AttentionSpec,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """`seen` [fields, pairs * kv_heads, BLOCK, dim] -> [tiles * kv_heads * tile rows, value dim]."""
        scores, peaks = self._scores(q_rows, seen, group, spec)
        peak = _fold(torch.maximum, peaks[: group.counts[0]].clone(), peaks, group.counts)
        total, mixed = self._mixed(scores, peak, seen, group)
        return mixed.div_(_with_sinks(total, peak, sinks))

    def _attend_tree(
        self,
        q_rows: torch.Tensor,
        rows: torch.Tensor,
        part: _TreePart,
        spec: AttentionSpec,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """The results of the tips, bit for bit as `_attend` gives them if each tip had its stem's blocks
        before its own.
        """
        stems, tips = part.stems, part.tips
        stem_seen, tip_seen = self._gathered(rows, part.stem_keys), self._gathered(rows, part.tip_keys)
        stem_scores, stem_peaks = self._scores(q_rows, stem_seen, stems, spec)
        scores, peaks = self._scores(q_rows, tip_seen, tips, spec)
        stem_peak = _fold(torch.maximum, stem_peaks[: stems.counts[0]].clone(), stem_peaks, stems.counts)
        peak = stem_peak.view(-1)[part.stem_rows].view(tips.counts[0], -1)
        peak = _fold(torch.maximum, peak, peaks, tips.counts)
        stem_peak = peak.view(-1)[part.tip_rows].view_as(stem_peak)
        stem_sums = [
            values[part.stem_rows] for values in self._mixed(stem_scores, stem_peak, stem_seen, stems)
        ]
        total, mixed = self._mixed(scores, peak, tip_seen, tips, stem_sums)
        return mixed.div_(_with_sinks(total, peak, sinks))

    def _scores(
        self, q_rows: torch.Tensor, seen: torch.Tensor, group: _TileGroup, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> scores [pairs * kv_heads, tile rows, BLOCK], and their maxima [pairs, kv_heads * tile rows]"""
        keys = seen[0].transpose(1, 2)
        queries = q_rows.index_select(0, group.queries).view(-1, self._tile_rows, self._shape.head_dim)
        if spec.soft_cap:
            raw = torch.bmm(queries, keys).mul_(spec.scale)
            scores = soft_cap(raw, spec.soft_cap).add_(group.mask)
        else:
            scores = torch.baddbmm(group.mask, queries, keys, alpha=spec.scale)
        return scores, scores.amax(-1).view(group.pairs, -1)

    def _mixed(
        self,
        scores: torch.Tensor,
        peak: torch.Tensor,
        seen: torch.Tensor,
        group: _TileGroup,
        partial: Sequence[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums over the blocks of each tile, for `peak` [tiles, kv_heads * tile rows]: of the weights
        [tiles * kv_heads * tile rows, 1], and of the values that they weigh [the same, value dim].

        `partial`: both sums over the blocks before these. Overwrites `scores`.
        """
        value_dim = self._shape.format.value_dim
        weights = scores.sub_(peak.index_select(0, group.tile_of).view(-1, self._tile_rows, 1)).exp_()
        sums = weights.sum(-1).view(group.pairs, -1)
        mixed = torch.bmm(weights, seen[-1][..., :value_dim]).view(group.pairs, -1)
        tiles = group.counts[0]
        if partial is None:
            totals = torch.zeros_like(peak), mixed.new_zeros(tiles, mixed.shape[1])
        else:
            totals = partial[0].view(tiles, -1), partial[1].view(tiles, -1)
        total = _fold(torch.add, totals[0], sums, group.counts)
        return total.view(-1, 1), _fold(torch.add, totals[1], mixed, group.counts).view(-1, value_dim)

    def _tiles(self, span: QuerySpan, row: int, block: bool) -> Iterator[_QueryTile]:
        if span.paths is not None:
            for i, path in enumerate(span.paths):
                yield _QueryTile(span.pages, row + i, 1, span.start + len(path), span.start, path)
            return
        if block:
            end = span.start + span.count
            for i in range(span.count):
                yield _QueryTile(span.pages, row + i, 1, end, end)
            return
        for i in range(0, span.count, self._queries):
            count = min(self._queries, span.count - i)
            first = span.start + i + 1
            yield _QueryTile(span.pages, row + i, count, first, first + count - 1)

    def _stems(self, span: QuerySpan, tips: Sequence[_QueryTile]) -> list[_TreeStem]:
        """The tree's nodes by tiles. None where their paths have no whole block in common."""
        common = span.start // BLOCK
        stems = []
        for i in range(0, len(tips), self._queries):
            nodes = tips[i : i + self._queries]
            first = min(tip.first for tip in nodes)
            if first >= common:
                return []
            end = (
                common * BLOCK
            )  # `visible` is chosen so that the keys end there; nodes see all of them, or a window
            tile = _QueryTile(
                span.pages, nodes[0].row, len(nodes), end + 1 - len(nodes), span.start, first=first
            )
            stems.append(_TreeStem(tile, tuple(replace(tip, first=max(tip.first, common)) for tip in nodes)))
        return stems

    def _batches(self, tiles: Sequence[T]) -> Iterator[list[T]]:
        """Cuts tiles into runs whose gathered keys stay under the bound (a tile is never cut)."""
        shape = self._shape
        each = shape.fields * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
        budget = _GATHER_BYTES // (BLOCK * each)
        batch: list[T] = []
        blocks = 0
        for tile in tiles:
            if batch and blocks + tile.blocks > budget:
                yield batch
                batch, blocks = [], 0
            batch.append(tile)
            blocks += tile.blocks
        if batch:
            yield batch

    def _tree_part(
        self, stems: Sequence[_TreeStem], tips: Sequence[_QueryTile], sight: KeyVisibility
    ) -> _TreePart:
        tiles = [stem.tile for stem in stems]
        number = {tip.row: i for i, tip in enumerate(tips)}
        visible = np.zeros((len(stems), self._tile_rows), np.int64)
        stem_row = np.zeros((len(tips), self._tile_rows), np.int64)  # within all stems of one key head
        tip_row = np.zeros_like(visible)
        head = np.arange(self._tile_rows) % self._group
        for i, stem in enumerate(stems):
            node = np.minimum(np.arange(self._tile_rows) // self._group, len(stem.tips) - 1)
            visible[i] = np.array([tip.visible for tip in stem.tips])[node]
            tip_row[i] = self._row_of(np.array([number[tip.row] for tip in stem.tips])[node], head)
            for j, tip in enumerate(stem.tips):
                stem_row[number[tip.row]] = self._row_of(i, j * self._group + head)
        return _TreePart(
            self._keys(tiles),
            self._group_of(tiles, sight, visible=visible),
            self._keys(tips),
            self._group_of(tips, sight),
            self._of_all_heads(stem_row),
            self._of_all_heads(tip_row),
        )

    def _row_of(self, tile: np.ndarray | int, row: np.ndarray) -> np.ndarray:
        """A tile's row among the rows of all tiles, of its first key head."""
        return tile * self._shape.kv_heads * self._tile_rows + row

    def _of_all_heads(self, rows: np.ndarray) -> torch.Tensor:
        """[tiles, tile rows] of the first key head -> int64 [tiles * kv_heads * tile rows]"""
        heads = np.arange(self._shape.kv_heads)[:, None] * self._tile_rows
        return self._tensor((rows[:, None, :] + heads).reshape(-1))

    def _shared_part(self, tiles: Sequence[_QueryTile], sight: KeyVisibility) -> _KeyPart:
        """Tiles of one causal span: each reads some of the keys from the first one's first to the last's."""
        first = tiles[0].first
        groups = tuple(self._group_of([tile], sight, at=tile.first - first) for tile in tiles)
        return _KeyPart(self._keys([replace(tiles[-1], first=first)]), groups)

    def _keys(self, tiles: Sequence[_QueryTile]) -> _KeyGather:
        """The places of the fields of the tiles' blocks."""
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
        page = page * (shape.layers * shape.layer_rows)  # now its first row of heads
        fields = [self._of_each_head(page + field * size + slot) for field in range(shape.fields)]
        scales = self._scale_places(page, slot) if shape.scale_rows else None
        return _KeyGather(self._tensor(np.stack(fields).reshape(-1)), scales, blocks)

    def _scale_places(self, page: np.ndarray, slot: np.ndarray) -> torch.Tensor:
        """The places of the scales of both fields of rows [pairs, BLOCK], see `scale_rows`."""
        size, each, places = self._shape.page_size, scales_per_row(self._shape.head_dim), []
        for field in range(2):
            number = field * size + slot
            row = self._of_each_head(page + 2 * size + number // each)
            places.append(row * each + (number % each)[:, None, :])
        return self._tensor(np.stack(places).reshape(-1))

    def _of_each_head(self, rows: np.ndarray) -> np.ndarray:
        """Rows of heads [pairs, BLOCK] -> those of each head [pairs, kv_heads, BLOCK]"""
        kv_heads = self._shape.kv_heads
        return rows[:, None, :] * kv_heads + np.arange(kv_heads)[:, None]

    def _group_of(
        self,
        tiles: Sequence[_QueryTile],
        sight: KeyVisibility,
        at: int = 0,
        visible: np.ndarray | None = None,
    ) -> _TileGroup:
        """A tile's matrix row m is query min(m // group, count - 1), query head m % group of the key head.

        `visible` [tiles, tile rows]: how many keys each row sees, where they are not one more per query.
        """
        tile_of, block_of = _pairs(tiles)
        blocks = np.array([tile.blocks for tile in tiles])
        query = np.minimum(np.arange(self._tile_rows) // self._group, _column(tiles, "count") - 1)
        head = np.arange(self._tile_rows) % self._group
        heads = np.arange(self._shape.kv_heads)[:, None] * self._group + head  # [kv_heads, tile rows]
        queries = ((_column(tiles, "row") + query) * self._heads)[:, None, :] + heads
        if visible is None:
            visible = _column(tiles, "visible") + query
        key = block_of[:, None, None] * BLOCK + np.arange(BLOCK)
        after = key - visible[tile_of][:, :, None]  # below 0: the row's own key, and those before it
        sees = after < 0 if not sight.window else (after < 0) & (after >= -sight.window)
        if sight.chunk:
            sees &= key >= ((visible - 1) // sight.chunk * sight.chunk)[tile_of][:, :, None]
        if sight.unseen:
            sees &= (key >= sight.unseen) | (after == -1)
        mask = np.where(sees, np.float32(0), np.float32(-np.inf))
        return _TileGroup(
            at=at,
            pairs=len(tile_of),
            counts=tuple((blocks > step).sum().item() for step in range(blocks.max())),
            queries=self._tensor(queries[tile_of].reshape(-1)),
            mask=self._tensor(np.repeat(mask, self._shape.kv_heads, axis=0)),
            tile_of=self._tensor(tile_of),
        )

    def _result_rows(self, tiles: Sequence[_QueryTile], rows: int) -> torch.Tensor:
        kv_heads, group = self._shape.kv_heads, self._group
        heads = np.arange(self._heads)
        within = heads // group * self._tile_rows + heads % group
        places = np.zeros((padded_rows(rows), self._heads), np.int64)
        for i, tile in enumerate(tiles):
            query = np.arange(tile.count)[:, None]
            places[tile.row : tile.row + tile.count] = i * kv_heads * self._tile_rows + query * group + within
        return self._tensor(places.reshape(-1))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def _fold(
    fold: Callable[..., torch.Tensor], folded: torch.Tensor, values: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    """`values` [pairs, n] of each tile folded into `folded` [tiles, n], in the order of its blocks."""
    at = 0
    for count in counts:
        fold(folded[:count], values[at : at + count], out=folded[:count])
        at += count
    return folded


def _with_sinks(total: torch.Tensor, peak: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Sums of weights [n, 1] and what the sinks of a tile's rows weigh, for `peak` [tiles, rows]."""
    return total if sinks is None else total + (sinks - peak).exp_().view(-1, 1)


def _pairs(tiles: Sequence[_QueryTile]) -> tuple[np.ndarray, np.ndarray]:
    """The (tile, block) pairs of `tiles`: the first block of each, the second of those that have one, and so
    on. Two int64 [pairs].
    """
    blocks, first = (np.array([getattr(tile, name) for tile in tiles]) for name in ("blocks", "first"))
    step, tile_of = np.nonzero(np.arange(blocks.max())[:, None] < blocks)
    return tile_of, step + first[tile_of]


def _shared(
    tiles: Sequence[_QueryTile], tile_of: np.ndarray, block_of: np.ndarray
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


def _seen(tile: _QueryTile, sight: KeyVisibility) -> _QueryTile:
    """A copy of the tile without the blocks before its first query's window and chunk."""
    first = max(tile.visible - sight.window, 0) if sight.window else 0
    if sight.chunk:
        first = max(first, (tile.visible - 1) // sight.chunk * sight.chunk)
    return replace(tile, first=first // BLOCK)


def _column(tiles: Sequence[_QueryTile], name: str) -> np.ndarray:
    """One number a tile, int64 [tiles, 1]."""
    return np.array([[getattr(tile, name)] for tile in tiles])


def _along_tails(tiles: Sequence[_QueryTile], tile_of: np.ndarray, path: np.ndarray) -> np.ndarray:
    """Path places [pairs, BLOCK] turned into logical rows."""
    tails = np.zeros((len(tiles), max(len(tile.tail) for tile in tiles)), np.int64)
    for row, tile in zip(tails, tiles, strict=True):
        row[: len(tile.tail)] = tile.tail
    depth = path - _column(tiles, "straight")[tile_of]
    return np.where(depth < 0, path, tails[tile_of[:, None], np.maximum(depth, 0)])
