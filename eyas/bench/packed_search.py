"""Searches tiles of products with four-bit weights: those with which a decoder layer is fastest.

Two turns for each number of rows: how a product is cut, then what is in flight. In a turn each product gets
the best of its tiles, where the others keep theirs; and once more, for the others have got better.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from eyas.bench.fastest import FastestTile, TileRace, compiled
from eyas.bench.packed_layers import LayerJob, LayerWeights, PackedLayers
from eyas.engine.checkpoint.config import AttentionSpec, ExpertsSpec, LayerSpec
from eyas.engine.checkpoint.packed import PackedConfig
from eyas.engine.kernels.products import int4, skinny
from eyas.engine.kernels.products.skinny_tiles import (
    MOST_SHARES,
    Key,
    PackedStep,
    ProductShape,
    ProductTile,
    packed_tile_for,
)
from eyas.engine.models.table import read_model
from eyas.engine.parallel.shards import config_of_rank

ROWS = (8, 32, 16, 64, 128)
FEW = 8  # rows that are an operand from registers
TIMES = 2  # that a product is searched in a turn
FEWEST, MOST = 96, 1000  # programs
CUTS = ((32, 2), (64, 2), (64, 4), (128, 4), (128, 8))  # columns and warps
SHARING = ((32, 4), (32, 8), (64, 4))  # the same of warps that share k, of up to eight rows
SPLITS = (1, 2, 4, 8)
IN_FLIGHT, AHEAD = (3, 5), 128  # of all cuts
STAGES, AHEADS = (3, 4, 5, 7), (0, 64, 128, 256, 512)

STEP = PackedStep("int4", int4.UNITS[0], int4.PARTS, 2)

Candidates = Mapping[ProductShape, list[ProductTile]]
Tried = Mapping[tuple[LayerJob, int], Candidates]


def jobs_of(model: str, ranks: int, products: str) -> tuple[LayerJob, ...]:
    """The layers of one rank's share of a model, by their `products` ("int4"); () where it has no numbers of
    four bits.
    """
    config = config_of_rank(read_model(model, "dummy", impl="eyas"), ranks)
    packed = config.quantized
    if products != "int4" or not isinstance(packed, PackedConfig) or packed.bits != 4 or not packed.integers:
        return ()
    jobs = dict.fromkeys(_job(layer, config.hidden_size) for layer in config.layers)
    return tuple(job for job in jobs if job.products)


def _job(layer: LayerSpec, hidden: int) -> LayerJob:
    """Latents and experts have other products."""
    attention, spec = layer.attention, layer.feed_forward
    heads, products = (0, 0, 0), []
    if isinstance(attention, AttentionSpec) and not attention.latent:
        dim, normed = attention.head_dim, attention.head_norms and not attention.norms_behind
        heads = attention.num_heads, attention.num_kv_heads, dim
        rows = (heads[0] + 2 * heads[1]) * dim
        products.append(ProductShape(skinny.qkv_kind(normed, False), 0, rows, hidden, dim))
        products.append(ProductShape("linear", 0, hidden, heads[0] * dim, hidden))
    if not isinstance(spec, ExpertsSpec):
        products.append(ProductShape("gated", 0, 2 * spec.width, hidden, 2 * spec.width))
        products.append(ProductShape("linear", 0, hidden, spec.width, hidden))
    return LayerJob(*heads, tuple(products))


def search(
    jobs: tuple[LayerJob, ...], device: str, deadline: float
) -> Iterator[tuple[Key, FastestTile[ProductTile]]]:
    """The best tile of every product and number of rows, until the deadline (`time.monotonic`); times are a
    layer's.
    """
    layers: dict[tuple[LayerJob, int], LayerSearch] = {}
    for job in jobs:
        weights = LayerWeights(job, device)
        layers |= {(job, rows): LayerSearch(PackedLayers(weights, rows)) for rows in ROWS}
    left = 2 * TIMES * sum(len(job.products) for job, _ in layers)
    for turn in (LayerSearch.cuts, LayerSearch.finer):
        tried = {place: turn(found) for place, found in layers.items()}
        if device != "cpu":
            compiled(f"{__name__}:launches", (tried,), device)
        for (place, found), _ in itertools.product(layers.items(), range(TIMES)):
            for shape, tiles in sorted(tried[place].items(), key=lambda each: -each[0].n * each[0].k):
                now = time.monotonic()
                if now > deadline:
                    return
                yield found.key(shape), found.best(shape, tiles, now + (deadline - now) / left)
                left -= 1


def launches(tried: Tried) -> None:
    """Every launch of a turn, on "meta": a recipe of `eyas.engine.kernels.launch.warm`."""
    weights = {job: LayerWeights(job, "meta") for job, _ in tried}
    for (job, rows), candidates in tried.items():
        layers = PackedLayers(weights[job], rows)
        most = max(len(tiles) for tiles in candidates.values())
        for turn in range(most):
            tiles = {layers.key(shape): each[min(turn, len(each) - 1)] for shape, each in candidates.items()}
            layers.calls(tiles)[0]()


class LayerSearch:
    """Tiles of a layer's products for one number of rows, which get better."""

    def __init__(self, layers: PackedLayers) -> None:
        self.key, self._layers = layers.key, layers
        table = layers.launch.tiles
        self.tiles = {layers.key(shape): ruled(shape, table) for shape in layers.shapes}
        self._times: dict[Key, dict[ProductTile, float]] = {}

    def best(
        self, shape: ProductShape, tiles: list[ProductTile], deadline: float
    ) -> FastestTile[ProductTile]:
        """Gives the product the fastest of its tile and of these."""
        key = self.key(shape)
        race: TileRace[ProductTile] = TileRace(
            lambda tile: self._layers.calls(self.tiles | {key: tile}),
            self._layers.result,
            self._layers.device,
        )
        before = self.tiles[key]
        times = race.times(list(dict.fromkeys([before, *tiles])), deadline)
        self._times[key] = times
        self.tiles[key] = min(times, key=times.__getitem__)
        return FastestTile(self.tiles[key], times[self.tiles[key]], times[before])

    def cuts(self) -> Candidates:
        """Every cut of every product, and the tile that it has."""
        return self._candidates(lambda shape: [self.tiles[self.key(shape)], *cuts(shape)])

    def finer(self) -> Candidates:
        """The best two cuts of every product, with more or less in flight."""
        return self._candidates(lambda shape: finer(shape, self._ranked(shape)))

    def _candidates(self, of: Callable[[ProductShape], list[ProductTile]]) -> Candidates:
        return {shape: list(dict.fromkeys(of(shape))) for shape in self._layers.shapes}

    def _ranked(self, shape: ProductShape) -> list[ProductTile]:
        """Tiles that were measured, the fastest first."""
        times = self._times.get(self.key(shape), {})
        return sorted(times, key=times.__getitem__) or [self.tiles[self.key(shape)]]


def ruled(shape: ProductShape, table: Mapping[Key, ProductTile]) -> ProductTile:
    """The tile that an engine has without a search."""
    return packed_tile_for(shape, STEP, 2, table)


def cuts(shape: ProductShape) -> list[ProductTile]:
    """Tiles that differ in columns, warps and what these share, parts of k and stages."""
    tiles, rows = [], shape.rows
    sharing = [(*cut, True) for cut in SHARING if rows <= FEW]
    every = [*((*cut, False) for cut in CUTS), *sharing]
    for (columns, warps, shares), split, stages in itertools.product(every, SPLITS, IN_FLIGHT):
        programs = shape.n // columns * split
        if not FEWEST <= programs <= MOST or split * shape.n * rows > MOST_SHARES * skinny.MAX_ROWS:
            continue
        if warps == 2 and rows > FEW or columns * rows > warps << 11 or shares and split > 2:
            continue
        if shape.kind == "linear" and columns < 64 and not shares:  # it leaves many parts of sums
            continue
        tiles += _fitting(shape, [ProductTile(columns, 0, warps, stages, split, AHEAD, shares_k=shares)])
    return list(dict.fromkeys(tiles))


def finer(shape: ProductShape, ranked: list[ProductTile]) -> list[ProductTile]:
    """The best tile with all stages and lines ahead, and the next one of another cut with some of them."""
    best, *others = ranked
    flights = [(best, *each) for each in itertools.product(STAGES, AHEADS)]
    for other in [each for each in others if not _same_cut(each, best)][:1]:
        flights += [(other, *each) for each in itertools.product(STAGES[:3:2], AHEADS[1:4:2])]
    return _fitting(shape, [replace(tile, stages=stages, ahead=ahead) for tile, stages, ahead in flights])


def _same_cut(one: ProductTile, other: ProductTile) -> bool:
    return replace(one, stages=other.stages, ahead=other.ahead) == other


def _fitting(shape: ProductShape, tiles: list[ProductTile]) -> list[ProductTile]:
    """The tiles that are cut as they say, with the depth of a step, and with no more in flight than fits."""
    made = []
    for tile in tiles:
        key = f"int4 {shape.kind}", shape.rows, shape.n, shape.k
        fitted = ruled(shape, {key: tile})
        if replace(tile, depth=fitted.depth, stages=fitted.stages, ahead=fitted.ahead) == fitted:
            made.append(fitted)
    return made
