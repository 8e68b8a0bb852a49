"""Tries tiles of products with four-bit weights: every one that fits, each against the rule's result.

A product is measured alone, over as many weights as an L2 cache does not hold.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from eyas.bench.fastest import Call, FastestTile, TileRace
from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.checkpoint.packed import PackedConfig
from eyas.engine.kernels.products import int4, skinny
from eyas.engine.kernels.products.packed_table import Key
from eyas.engine.kernels.products.skinny_tiles import (
    MOST_SHARES,
    ProductShape,
    ProductTile,
    packed_tile_for,
)
from eyas.engine.models.table import read_model
from eyas.engine.parallel.shards import config_of_rank

ROWS = (8, 16, 32, 64, 128)
GROUP = 128
UNCACHED = 256 << 20  # bytes
FEWEST, MOST = 100, 1000  # programs


def jobs_of(model: str, ranks: int, products: str) -> tuple[ProductShape, ...]:
    """The `products` ("int4") of one rank's share of a model, as of no rows; () where it has no numbers of
    four bits.

    Those of q, k and v are measured as plain ones, whose tiles lie in one head.
    """
    config = config_of_rank(read_model(model, "dummy", impl="eyas"), ranks)
    packed = config.quantized
    if products != "int4" or not isinstance(packed, PackedConfig) or packed.bits != 4 or not packed.integers:
        return ()
    jobs: dict[ProductShape, None] = {}
    for layer in config.layers:
        attention, spec, hidden = layer.attention, layer.feed_forward, config.hidden_size
        if not attention.latent:
            dim, heads = attention.head_dim, attention.num_heads
            jobs[ProductShape("qkv", 0, (heads + 2 * attention.num_kv_heads) * dim, hidden, dim)] = None
            jobs[ProductShape("linear", 0, hidden, heads * dim, hidden)] = None
        if not isinstance(spec, ExpertsSpec):
            jobs[ProductShape("gated", 0, 2 * spec.width, hidden, 2 * spec.width)] = None
            jobs[ProductShape("linear", 0, hidden, spec.width, hidden)] = None
    return tuple(jobs)


def search(
    jobs: tuple[ProductShape, ...], device: str, deadline: float
) -> Iterator[tuple[Key, FastestTile[ProductTile]]]:
    """The best tile of every product and number of rows, until the deadline (`time.monotonic`)."""
    for job in jobs:
        bench = PackedBench(job, device)
        for rows in ROWS:
            if time.monotonic() > deadline:
                return
            yield (f"int4 {job.kind}", rows, job.n, job.k), bench.best(rows, deadline)


def launches(jobs: tuple[ProductShape, ...]) -> None:
    """Every launch that a search may make, on "meta": a recipe of `eyas.engine.kernels.launch.warm`."""
    for job in jobs:
        bench = PackedBench(job, "meta")
        for rows in ROWS:
            for tile in candidates(replace(job, rows=rows)):
                bench.calls(rows, tile)[0]()


def candidates(shape: ProductShape) -> list[ProductTile]:
    """Tiles that fit, the rule's first."""
    tiles = [packed_tile_for(shape, int4.UNITS[0], 2)]
    cuts = itertools.product((32, 64, 128), (1, 2, 4, 8), (2, 3, 4), (2, 4, 8), (0, 64, 128))
    for columns, split, stages, warps, ahead in cuts:
        programs, rows = shape.n // columns * split, shape.rows
        if not FEWEST <= programs <= MOST or split * shape.n * rows > MOST_SHARES * skinny.MAX_ROWS:
            continue
        if not 16 * warps <= columns <= 32 * warps or (warps == 2 and rows > 16):
            continue
        tile = ProductTile(columns, 0, warps, stages, split, ahead)
        key = f"int4 {shape.kind}", rows, shape.n, shape.k
        fitted = packed_tile_for(shape, int4.UNITS[0], 2, {key: tile})
        if replace(fitted, depth=0) == tile:
            tiles.append(fitted)
    return list(dict.fromkeys(tiles))


class PackedBench:
    """Weights of a product on a device, and rows for them."""

    def __init__(self, job: ProductShape, device: str) -> None:
        self.job, self._device = job, device
        self._dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self._launch = skinny.ProductLaunch.on(device, pdl=device != "cpu")
        count = 1 if device in ("cpu", "meta") else 2 * UNCACHED // (job.n * job.k) + 1
        self._weights = [self._weight() for _ in range(count)]

    def best(self, rows: int, deadline: float) -> FastestTile[ProductTile]:
        """The fastest of `candidates` whose result is the rule's."""
        race = TileRace(partial(self.calls, rows), self._result, self._device)
        return race.fastest(candidates(replace(self.job, rows=rows)), deadline)

    def _result(self, call: Call) -> torch.Tensor:
        call()
        return self._out.float()

    def calls(self, rows: int, tile: ProductTile) -> list[Call]:
        """The product with each of the weights, by this tile; `_out` has the last one's result."""
        job = self.job
        kind = "gated" if job.kind == "gated" else "linear"
        launch = replace(self._launch, tiles={(f"int4 {kind}", rows, job.n, job.k): tile})
        random = None if self._device == "meta" else torch.Generator(self._device).manual_seed(rows)
        x = torch.empty(rows, job.k, dtype=self._dtype, device=self._device)
        x.normal_(generator=random)
        self._out = x.new_empty(rows, job.n // 2 if kind == "gated" else job.n)
        run: Callable[..., None] = skinny.gated if kind == "gated" else skinny.linear
        return [partial(run, skinny.SkinnyInput(x), weight, self._out, launch) for weight in self._weights]

    def _weight(self) -> int4.Int4Weight:
        job = self.job
        numbers = torch.randint(16, (job.n, job.k), dtype=torch.uint8, device=self._device)
        scales = torch.full((job.n, job.k // GROUP), job.k**-0.5 / 8, device=self._device)
        return int4.packed(numbers, 8, scales.half(), self._dtype)
