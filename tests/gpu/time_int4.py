"""Tiles of a Llama-3.1-8B's products with four-bit weights and up to eight rows on a GPU, by whole layers.

    python -m tests.gpu.time_int4 --out FILE [--seconds 40] [--turns 2]

Layers as `eyas.bench.packed_layers` runs them, of one row and of eight, which have the same kernels: where
`eyas tune int4` looks at eight rows alone, this takes the tile with which both together are fastest. Product
by product, the others as they are; then once more. A line of JSON for each tile, microseconds of a layer.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from pathlib import Path

from eyas.bench.kernels.timing import graph_us
from eyas.bench.output import append_line
from eyas.bench.packed_layers import LayerJob, LayerWeights, PackedLayers
from eyas.engine.kernels.launch.warm import KernelWarmup
from eyas.engine.kernels.products.skinny_tiles import Key, ProductShape, ProductTile

QKV, OUT, GATED, DOWN = SHAPES = (
    ProductShape("qkv", 0, 6144, 4096, 128),
    ProductShape("linear", 0, 4096, 4096, 4096),
    ProductShape("gated", 0, 28672, 4096, 28672),
    ProductShape("linear", 0, 4096, 14336, 4096),
)
JOB = LayerJob(32, 8, 128, SHAPES)
ROWS, KEYED, REPLAYS = (1, 8), 8, 13
DIFFERENT = 2e-2


def tiles(cut: tuple[int, int, int], stages: tuple[int, ...], ahead: tuple[int, ...]) -> list[ProductTile]:
    """Of columns, warps and parts of k, with these in flight."""
    columns, warps, split = cut
    return [
        ProductTile(columns, 0, warps, *each[:1], split, each[1]) for each in itertools.product(stages, ahead)
    ]


def shared(cut: tuple[int, int, int], stages: tuple[int, ...], ahead: tuple[int, ...]) -> list[ProductTile]:
    """The same, whose warps share k."""
    columns, warps, split = cut
    flights = itertools.product(stages, ahead)
    return [ProductTile(columns, 0, warps, some, split, lines, shares_k=True) for some, lines in flights]


CANDIDATES = {
    GATED: [
        *tiles((64, 4, 1), (3, 4, 5, 6, 7), (128, 256, 512)),
        *tiles((128, 8, 1), (3, 4), (128, 256)),
        *shared((64, 2, 1), (3, 4), (128, 256)),
    ],
    OUT: [
        *shared((32, 4, 1), (4, 5), (64, 256, 512)),
        *shared((32, 4, 2), (3, 4), (128, 256)),
    ],
    DOWN: [
        *tiles((64, 2, 8), (3, 4, 5), (64, 128, 256)),
        *tiles((64, 4, 8), (3, 4), (64, 256)),
        *shared((64, 4, 2), (3, 4), (64,)),
        *shared((64, 2, 4), (3, 4), (64,)),
    ],
    QKV: [
        *tiles((64, 4, 4), (3, 4, 5), (64, 128, 256)),
        *tiles((64, 2, 4), (4,), (128, 256)),
        *tiles((64, 4, 2), (4,), (128, 256)),
        *shared((32, 4, 1), (3, 4), (256,)),
        *shared((32, 4, 2), (3,), (128, 256)),
    ],
}
NAMES = dict(zip(SHAPES, ("qkv", "o", "gate and up", "down"), strict=True))


def key(shape: ProductShape) -> Key:
    return f"int4 {shape.kind}", KEYED, shape.n, shape.k


def recipe() -> None:
    """Every launch, on "meta"."""
    layers = PackedLayers(LayerWeights(JOB, "meta"), KEYED)
    usual = layers.launch.tiles
    layers.calls(usual)[0]()
    for shape, each in CANDIDATES.items():
        for tile in each:
            layers.calls({**usual, key(shape): tile})[0]()


class LayerRace:
    """The tiles with which layers of one row and of eight are fastest so far."""

    def __init__(self, out: Path) -> None:
        weights = LayerWeights(JOB, "cuda")
        self._layers = [PackedLayers(weights, rows) for rows in ROWS]
        self._out, self.tiles = out, dict(self._layers[0].launch.tiles)
        self._expected = [layers.result(layers.calls(self.tiles)[0]) for layers in self._layers]
        self.best = self._us("table", self.tiles)

    def run(self, shape: ProductShape) -> None:
        """Gives a product the fastest of its tile and its candidates."""
        self.best = self._us(f"{NAMES[shape]} {self.tiles[key(shape)]}", self.tiles)
        for tile in CANDIDATES[shape]:
            tried = self.tiles | {key(shape): tile}
            if (us := self._us(f"{NAMES[shape]} {tile}", tried)) < self.best:
                self.best, self.tiles = us, tried

    def end(self) -> None:
        """States the tiles, and their times once more."""
        for shape in SHAPES:
            append_line(self._out, {"product": NAMES[shape], "tile": str(self.tiles[key(shape)])})
        self._us("best", self.tiles)

    def _us(self, what: str, tried: dict[Key, ProductTile]) -> float:
        """Of both layers together; infinite if a result differs, or a kernel does not fit."""
        times, errors = [], []
        try:
            for layers, expected in zip(self._layers, self._expected, strict=True):
                calls = layers.calls(tried)
                errors.append(((layers.result(calls[0]) - expected).norm() / expected.norm()).item())
                times.append(round(graph_us(calls, REPLAYS), 2))
        except Exception as failed:
            append_line(self._out, {"what": what, "failed": str(failed)[:120]})
            return float("inf")
        append_line(self._out, {"what": what, "us": times, "error": round(max(errors), 5)})
        return sum(times) if max(errors) < DIFFERENT else float("inf")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    began = time.monotonic()
    report = KernelWarmup("tests.gpu.time_int4:recipe", (), 90, os.cpu_count() or 1).wait()
    append_line(args.out, {"kernels": report.kernels, "compiled s": round(time.monotonic() - began, 1)})
    race = LayerRace(args.out)
    for shape in (GATED, OUT, DOWN, QKV) * args.turns:
        if time.monotonic() - began < args.seconds:
            race.run(shape)
    race.end()
    append_line(args.out, {"s": round(time.monotonic() - began, 1)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
