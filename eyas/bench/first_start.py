"""Searches tiles for a model's products that no table has, for a bounded time, and keeps them in the cache:

    python -m eyas.bench.first_start --model DIR --tp N --device cuda --seconds S

A worker's first start on a kind of GPU runs it (`eyas.engine.loading.first_tiles`). Two fifths of the time
are for the compiler: each product has as many tiles as it then makes. What time does not reach has the
rule's.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from eyas.bench.fastest import Call, FastestTile, TileRace, compiled
from eyas.bench.tile_search import TuningBench, TuningJob, candidates, meant
from eyas.common.machine import gpus
from eyas.engine.kernels.experts import grouped_tiles
from eyas.engine.kernels.experts.grouped_tiles import GroupedTile
from eyas.engine.kernels.products import skinny
from eyas.engine.kernels.products.skinny_tiles import ProductShape, ProductTile, tile_for
from eyas.engine.loading.first_tiles import keep_tiles
from eyas.engine.loading.product_shapes import DenseProduct, ExpertProducts, SearchedProducts
from eyas.engine.models.table import read_model

EACH_S = 2.0  # of a core, to compile a tile's kernel
SHARE = 0.4  # of the time, to compile
FEWEST_TILES, MOST_TILES = 3, 10  # of a product
COLD_BYTES, MOST_SETS = 192 << 20, 12  # of a product's weights: more than L2 keeps
CUTS = ((64, 1, 128), (64, 2, 128), (128, 1, 64), (128, 2, 64), (64, 1, 256), (64, 4, 128), (128, 1, 128))
"""Columns, parts of k, and depth."""

FEWEST, MOST = 48, 1056  # programs of a cut
PAGE = 16
RECIPE = "eyas.bench.first_start:launches"
"""For the compiler's processes, to which this module, when it is run, is not `__main__`."""


def within(products: SearchedProducts, seconds: float, cores: int) -> tuple[SearchedProducts, int]:
    """The products that so much time is enough for, and the tiles of each."""
    kernels = max(int(cores * seconds * SHARE / EACH_S), FEWEST_TILES)
    weights = len(products.dense) + 2 * len(products.experts)
    most = min(max(kernels // max(weights, 1), FEWEST_TILES), MOST_TILES)
    dense = products.dense[: kernels // most]
    experts = products.experts[: max(kernels // most - len(dense), 0) // 2]
    return SearchedProducts(dense, experts), most


def dense_tiles(shape: ProductShape, most: int) -> list[ProductTile]:
    """The rule's tile, and others that are cut as they say."""
    tiles = [tile_for(shape, 2, {})]
    for columns, split, depth in CUTS:
        warps = 8 if columns * shape.rows > 8192 else 4
        prefetching = ProductTile(columns, depth, warps, stages=5, split=split, ahead=256)
        tile = tile_for(shape, 2, {(shape.kind, shape.rows, shape.n, shape.k): prefetching})
        if tile.split == split and FEWEST <= shape.n // tile.columns * split <= MOST:
            tiles.append(tile)
    return list(dict.fromkeys(tiles))[:most]


class DenseBench:
    """Weights, rows and results of a product, on a device."""

    def __init__(self, product: DenseProduct, device: str) -> None:
        self.product, self._device = product, device
        shape = product.shape
        self._dtype = torch.float32 if device == "cpu" else torch.bfloat16
        sets = 1 if device in ("cpu", "meta") else min(-(-COLD_BYTES // (2 * shape.n * shape.k)), MOST_SETS)
        self._launch = skinny.ProductLaunch.on(device, pdl=device != "cpu")
        self._source = skinny.SkinnyInput(self._made(shape.rows, shape.k))
        self._weights = [self._made(shape.n, shape.k).mul_(shape.k**-0.5) for _ in range(sets)]

    def _made(self, *sizes: int) -> torch.Tensor:
        made = torch.empty(*sizes, dtype=self._dtype, device=self._device)
        return made if self._device == "meta" else made.normal_()

    def fastest(self, tiles: Sequence[ProductTile], deadline: float) -> FastestTile[ProductTile]:
        """The fastest of these, of which the first is the rule's."""
        race: TileRace[ProductTile] = TileRace(self.calls, lambda call: call().float(), self._device)
        return race.fastest(tiles, deadline)

    def calls(self, tile: ProductTile) -> list[Call]:
        """The product of each weight, by this tile."""
        launch = replace(self._launch, tiles={self.product.key: tile})
        made = {"linear": self._linear, "gated": self._gated}.get(self.product.shape.kind, self._qkv)
        return [partial(made, weight, launch) for weight in self._weights]

    def _linear(self, weight: torch.Tensor, launch: skinny.ProductLaunch) -> torch.Tensor:
        out = skinny.empty_padded(self.product.shape.rows, weight.shape[0], like=self._source.x)
        skinny.linear(self._source, weight, out, launch)
        return out

    def _gated(self, weight: torch.Tensor, launch: skinny.ProductLaunch) -> torch.Tensor:
        out = skinny.empty_padded(self.product.shape.rows, weight.shape[0] // 2, like=self._source.x)
        skinny.gated(self._source, weight, out, launch)
        return out

    def _qkv(self, weight: torch.Tensor, launch: skinny.ProductLaunch) -> torch.Tensor:
        """Writes keys and values to pages of its own, which no attention reads."""
        shape, (heads, kv_heads, dim) = self.product.shape, self.product.heads
        rows = torch.arange(shape.rows, dtype=torch.int32, device=self._device)
        layer = weight.new_zeros(-(-shape.rows // PAGE), 2, PAGE, kv_heads, dim)
        angles = torch.ones(2, shape.rows, dim // 2, dtype=torch.float32, device=self._device)
        norms = None
        if shape.kind == "heads":
            norms = skinny.HeadNorms(weight.new_ones(2, dim), 1e-6)
        q = skinny.empty_padded(shape.rows, heads, dim, like=weight)
        rotation, kv = skinny.RotaryInput(angles[0], angles[1], rows), skinny.KvRows(layer, rows)
        skinny.qkv_rope(self._source, skinny.QkvWeights(weight, None, norms), q, rotation, kv, launch)
        return q


class ExpertBench:
    """Both products of experts, whose blocks have as many rows as the rule says."""

    def __init__(self, products: ExpertProducts, device: str) -> None:
        self.products, self._device = products, device
        self._bench = TuningBench(TuningJob(products.shapes, products.per_row), device)
        self._choices = products.rows * products.per_row
        self._block = grouped_tiles.tile_for(products.shapes[0], self._choices, {}).rows

    def tiles(self, at: int, most: int) -> list[GroupedTile]:
        """The rule's tile of one of the two, and others: wide ones and few parts first."""
        ruled, *others = candidates(self.products.shapes[at], self._choices, self._block)
        deep = [tile for tile in others if tile.stages > 4 and tile.warps == 4]
        return [ruled, *sorted(deep, key=lambda tile: (-tile.columns, tile.split))][:most]

    def races(self, most: int) -> Iterator[tuple[Any, list[GroupedTile], TileRace[GroupedTile]]]:
        """Yields for each of the two products its key, its tiles and the race between them."""
        for at, key in enumerate(self.products.keys):
            inputs = self._bench.inputs(at, self.products.rows, self._block)
            calls = partial(self._calls, at, inputs)
            yield key, self.tiles(at, most), TileRace(calls, _stored, self._device)

    def _calls(self, at: int, inputs: list[Any], tile: GroupedTile) -> list[Call]:
        return self._bench.calls(at, inputs, tile, self._choices)


def _stored(call: Call) -> torch.Tensor:
    return meant(call())


def launches(products: SearchedProducts, most: int) -> None:
    """Every launch of a search, on "meta": a recipe of `eyas.engine.kernels.launch.warm`."""
    for dense in products.dense:
        bench = DenseBench(dense, "meta")
        for tile in dense_tiles(dense.shape, most):
            bench.calls(tile)[0]()
    for experts in products.experts:
        for _, grouped, race in ExpertBench(experts, "meta").races(most):
            for cut in grouped:
                race.calls(cut)[0]()


SearchedTiles = tuple[dict[Any, ProductTile], dict[Any, GroupedTile], dict[Any, float]]


def search(products: SearchedProducts, device: str, deadline: float, most: int) -> SearchedTiles:
    """Tiles of dense products and of experts by their keys, and microseconds; until the deadline
    (`time.monotonic`).
    """
    dense: dict[Any, ProductTile] = {}
    experts: dict[Any, GroupedTile] = {}
    times: dict[Any, float] = {}
    for product in products.dense:
        if time.monotonic() > deadline:
            break
        best = DenseBench(product, device).fastest(dense_tiles(product.shape, most), deadline)
        dense[product.key], times[product.key] = best.tile, best.us
        _say(product.key, best)
    for pair in products.experts:
        if time.monotonic() > deadline:
            break
        for key, tiles, race in ExpertBench(pair, device).races(most):
            fastest_tiles = race.fastest(tiles, deadline)
            experts[key], times[key] = fastest_tiles.tile, fastest_tiles.us
            _say(key, fastest_tiles)
    return dense, experts, times


def _say(key: Any, best: FastestTile[Any]) -> None:
    print(f"{key}: {best.us:.1f} us (by the rule {best.ruled_us:.1f}), {best.tile}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m eyas.bench.first_start", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args(argv)
    untuned = SearchedProducts.of(read_model(args.model, "dummy", impl="eyas"), args.tp).untuned(args.device)
    some, most = within(untuned, args.seconds, len(os.sched_getaffinity(0)))
    torch.cuda.set_device(gpus.number_of(args.device))
    compiled(RECIPE, (some, most), args.device)
    with torch.inference_mode():
        dense, experts, times = search(some, args.device, began + args.seconds, most)
    keep_tiles(gpus.model(args.device), dense, experts, times)
    return 0


if __name__ == "__main__":
    sys.exit(main())
