"""Finds the tiles of the skinny products: `python -m tests.gpu.sweep_skinny --seconds 150 --out DIR`.

Prints one line a figure, the chain of 32 layers first of all, and leaves skinny.json in DIR: every
measurement, and the tiles as lines of `skinny_tiles.MEASURED`. A run cut off still says what it found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from eyas.engine.kernels.products import skinny
from eyas.engine.kernels.products.skinny_tiles import MEASURED, ProductShape, ProductTile, tile_for
from tests.gpu.skinny_bench import (
    DIM,
    EAGLE,
    LAYER,
    LM_HEAD,
    Call,
    Chain,
    Product,
    Rows,
    milliseconds,
    result,
    weights,
)

TIMED_ROWS = {16: 8, 32: 32, 64: 48, 128: 128}
ROWS = (1, 8, 16, 32, 48, 64, 96, 128)
IN_FLIGHT = (104 << 10, 200 << 10)  # bytes of shared memory a program
COLUMNS, SPLITS, DEPTHS = (64, 128, 256), (1, 2, 4, 8), (64, 128, 256)
AHEADS = (0, 64, 128, 256, 512, 1024)
SMS = 132
Key = tuple[str, int, int, int]
_LONG = 4 << 30  # bytes: about a millisecond


class Sweep:
    def __init__(self, seconds: float, out: Path, rows: Sequence[int]) -> None:
        self._rows = rows
        self._deadline, self._file = time.monotonic() + seconds, out / "skinny.json"
        self._launch = skinny.ProductLaunch.on("cuda", pdl=True)
        self._records: list[dict[str, Any]] = []
        self._best: dict[Key, ProductTile] = dict(MEASURED)
        self._layers = {p.name: weights(p) for p in LAYER}

    def run(self) -> None:
        self.chains("known", (48,))
        for rows in self._rows:
            self.descend(rows, {p: self.product(p, rows, self._layers[p.name]) for p in LAYER})
            self.chains("best", [m for m in ROWS if padded(m) == rows])
        for product in (LM_HEAD, *EAGLE):
            stack = weights(product)
            for rows in self._rows:
                self.product(product, rows, stack)
        for key, tile in self._best.items():
            print(f"    {key}: {tile},", flush=True)

    # --- one product -------------------------------------------------------------------------------------

    def product(self, product: Product, rows: int, stack: list[torch.Tensor]) -> list[ProductTile]:
        """Measures all candidates and prints the best at every m; the best few, best first."""
        if self.over():
            return []
        at = Rows(TIMED_ROWS[rows])
        tiles = list(candidates(product, rows))
        times = self.measured(product, at, stack, tiles)
        best = ranked(times)
        if best:
            self._best[self.key(product, rows)] = best[0]
            for m in ROWS:
                if padded(m) == rows:
                    self.beside_cublas(product, m, stack, best[0])
        self.save()
        return best[:8]

    def measured(
        self, product: Product, at: Rows, stack: list[torch.Tensor], tiles: list[ProductTile]
    ) -> dict[ProductTile, float]:
        """Microseconds of each tile that works."""
        rows = padded(at.m)
        launches = {t: self.with_tiles({self.key(product, rows): t}) for t in tiles}
        compile_all(lambda x: at.call(product, stack[0], x)(), launches.values())
        expected, times = at.expected(product, stack[0]), {}
        for tile, launch in launches.items():
            if self.over():
                break
            record = {"product": product.name, "m": at.m, **asdict(tile)}
            try:
                calls = [at.call(product, w, launch) for w in stack]
                calls[0]()
                record["error"] = relative_error(result(calls[0]), expected)
                times[tile] = record["us"] = microseconds(calls, product)
            except Exception as error:  # a tile too large for the machine is a finding, not an end
                record["failed"] = f"{type(error).__name__}: {error}"[:200]
            if record.get("error", 0.0) > 0.02:
                print(f"WRONG {record}", flush=True)
                times.pop(tile, None)
            self.keep(record)
        return times

    def beside_cublas(self, product: Product, m: int, stack: list[torch.Tensor], tile: ProductTile) -> None:
        at = Rows(m)
        launch, x = self.with_tiles({self.key(product, padded(m)): tile}), at.x[product.k]
        ours = microseconds([at.call(product, w, launch) for w in stack], product)
        theirs = microseconds([lambda w=w: torch.mm(x, w.t()) for w in stack], product)
        speed, cublas = (product.nbytes / us / 1e3 for us in (ours, theirs))
        print(
            f"{product.name:13} m={m:2} {ours:7.2f} us {speed:5.0f} GB/s   "
            f"cuBLAS {theirs:7.2f} us {cublas:5.0f} GB/s   {tile}",
            flush=True,
        )
        self.keep({"product": product.name, "m": m, "us": ours, "cublas_us": theirs, **asdict(tile)})

    # --- the chain ---------------------------------------------------------------------------------------

    def chains(self, name: str, ms: Iterable[int]) -> None:
        """All layers with the best tiles known, beside plain torch."""
        for m in ms:
            chain = Chain(self._layers, m)
            launches = [replace(self.with_tiles(self._best), pdl=pdl) for pdl in (True, False)]
            compile_all(chain.fused, launches)
            for launch in launches:
                self.say_chain(chain, f"{name:4} m={m:2} pdl={launch.pdl!s:5}", partial(chain.fused, launch))
            fused = chain.x.float()
            self.say_chain(chain, f"torch m={m:2}", chain.plain)
            print(
                f"chain m={m}: fused against torch {relative_error(fused, chain.x.float()):.4f}", flush=True
            )
            self.say_chain(chain, f"torch.mm alone m={m:2}", chain.products)

    def say_chain(self, chain: Chain, name: str, call: Call) -> float:
        ms = milliseconds([call])
        print(f"chain {name:24} {ms:6.3f} ms {chain.nbytes / ms / 1e6:5.0f} GB/s", flush=True)
        self.keep({"chain": name, "ms": ms})
        return ms

    def descend(self, rows: int, best: dict[Product, list[ProductTile]]) -> None:
        """Takes, product by product, the tile, and then the overlap, that makes the whole chain fastest."""
        chain = Chain(self._layers, TIMED_ROWS[rows])
        for options in (lambda p, _: best[p], aheads):
            known = [(p, self.key(p, rows)) for p in LAYER]
            self.settle(chain, [(key, t) for p, key in known for t in options(p, self._best[key])])
        self.save()

    def settle(self, chain: Chain, trials: list[tuple[Key, ProductTile]]) -> None:
        compile_all(chain.fused, [self.with_tiles(self._best | {key: tile}) for key, tile in trials])
        fastest = milliseconds([partial(chain.fused, self.with_tiles(self._best))])
        for key, tile in trials:
            if self.over():
                break
            try:
                ms = milliseconds([partial(chain.fused, self.with_tiles(self._best | {key: tile}))])
            except Exception as error:
                print(f"chain failed: {key} {tile} {type(error).__name__}", flush=True)
                continue
            self.keep({"chain": key, "ms": ms, **asdict(tile)})
            if ms < fastest:
                fastest, self._best[key] = ms, tile
        print(f"chain m={chain.x.shape[0]:2} settled at {fastest:6.3f} ms", flush=True)

    # --- what all share ----------------------------------------------------------------------------------

    @staticmethod
    def key(product: Product, rows: int) -> Key:
        return product.kind, rows, product.n, product.k

    def with_tiles(self, tiles: dict[Key, ProductTile]) -> skinny.ProductLaunch:
        return replace(self._launch, tiles=tiles)

    def keep(self, record: dict[str, Any]) -> None:
        self._records.append(record)

    def over(self) -> bool:
        return time.monotonic() > self._deadline

    def save(self) -> None:
        tiles = [f"{key}: {tile}" for key, tile in self._best.items()]
        self._file.write_text(json.dumps({"tiles": tiles, "records": self._records}, indent=1))


def candidates(product: Product, rows: int) -> Iterable[ProductTile]:
    """Tiles that give most SMs something, with accumulators of at most 128 registers a thread."""
    seen: set[ProductTile] = set()
    for columns, split, depth, in_flight in itertools.product(COLUMNS, SPLITS, DEPTHS, IN_FLIGHT):
        if columns == 64 and product.kind == "gated":
            continue
        programs = product.n // columns * split
        if programs < 0.45 * SMS or (programs > 4 * SMS and product.n < 20_000):
            continue
        stages = min(8, in_flight // ((columns + rows) * depth * 2))
        for warps in (4, 8):
            tile = ProductTile(columns, depth, warps, stages, split)
            if stages >= 3 and columns * rows * 4 <= warps << 14 and fits(tile, product, rows):
                seen.add(tile)
    return seen


def aheads(product: Product, tile: ProductTile) -> list[ProductTile]:
    longest = product.k // tile.split
    return [replace(tile, ahead=ahead) for ahead in AHEADS if ahead <= longest]


def fits(tile: ProductTile, product: Product, rows: int) -> bool:
    shape = ProductShape(
        product.kind, rows, product.n, product.k, DIM if product.kind == "qkv" else product.n
    )
    return tile_for(shape, 2, {(product.kind, rows, product.n, product.k): tile}) == tile


def padded(m: int) -> int:
    return max(16, triton.next_power_of_2(m))


def microseconds(calls: list[Call], product: Product) -> float:
    """Of one call, in a graph that runs long enough for its own start not to count."""
    times = -(-_LONG // (len(calls) * product.nbytes))
    return milliseconds(calls * times) * 1e3 / (len(calls) * times)


def ranked(times: dict[ProductTile, float]) -> list[ProductTile]:
    return sorted(times, key=times.__getitem__)


def compile_all(
    call: Callable[[skinny.ProductLaunch], None], launches: Iterable[skinny.ProductLaunch]
) -> None:
    """Compiles in parallel what `call` would launch; what does not compile fails again when it is run."""
    pool = ThreadPoolExecutor(os.cpu_count())
    with pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for launch in launches:
            call(replace(launch, compile_only=True))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.float()
    return float((got.float() - expected).norm() / expected.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", choices=TIMED_ROWS, default=list(TIMED_ROWS))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(args.seconds, args.out, args.rows)
    try:
        sweep.run()
    finally:
        sweep.save()


if __name__ == "__main__":
    main()
