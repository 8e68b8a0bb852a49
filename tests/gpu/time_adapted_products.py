"""Products with adapters on one GPU: us that they add to a product, and when kernels begin and end.

    python -m tests.gpu.time_adapted_products [--rows 1 32 192] [--start-times]

Eight layers of an 8B shape's four products in one graph, rank 16 in 32 slots: without adapters, then with
none, one, eight and 32 of them among the rows, for all products and for each alone, of which the others are
plain. More than 128 rows are multiplied by the library, and what is added comes behind. Attention and norms
are left out. `--start-times`: kernels of a layer in the middle, by torch.profiler. A CPU tries it out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from eyas.bench.kernels.timing import graph_us
from eyas.engine.kernels.products import skinny, updates

CUDA = torch.cuda.is_available()
DEVICE, LAYERS, SLOTS, RANK, KV = ("cuda", 8, 32, 16, 8) if CUDA else ("cpu", 1, 4, 16, 1)
HIDDEN, INNER, HEADS, DIM = (4096, 14336, 32, 128) if CUDA else (64, 128, 2, 32)
DTYPE = torch.bfloat16 if CUDA else torch.float16
SHAPES = {
    "qkv": ((HEADS + 2 * KV) * DIM, HIDDEN, 3),
    "o": (HIDDEN, HEADS * DIM, 1),
    "gated": (2 * INNER, HIDDEN, 2),
    "down": (HIDDEN, INNER, 1),
}
"""Rows and columns of each weight, and the parts of its updates."""
EPS = 1e-5


@dataclass(frozen=True)
class AdaptedRows:
    """The rows of a pass, and the products that adapters update."""

    x: torch.Tensor
    slots: torch.Tensor
    updated: Sequence[str]


class Products:
    """The weights of all layers, and the updates of all slots."""

    def __init__(self) -> None:
        self.launch = skinny.ProductLaunch.on(DEVICE, pdl=CUDA)
        self.weights = [
            {
                name: torch.randn(n, k, device=DEVICE, dtype=DTYPE) / k**0.5
                for name, (n, k, _) in SHAPES.items()
            }
            for _ in range(LAYERS)
        ]
        words = [RANK * (parts * k + n) for n, k, parts in SHAPES.values()] * LAYERS
        numbers = torch.randn(SLOTS * sum(words), device=DEVICE, dtype=DTYPE) * 0.02
        ends = torch.tensor(words * SLOTS).cumsum(0).view(SLOTS, -1)
        places = torch.zeros(SLOTS + 1, len(words), 2, dtype=torch.int64)
        places[1:, :, 0], places[1:, :, 1] = ends - torch.tensor(words), RANK
        places = places.to(DEVICE)
        self.sites = [
            {
                name: updates.SiteNumbers(
                    numbers, places[:, layer * len(SHAPES) + at], _parts(name).to(DEVICE), shape[2], RANK
                )
                for at, (name, shape) in enumerate(SHAPES.items())
            }
            for layer in range(LAYERS)
        ]
        self.places = torch.arange(skinny.MAX_ROWS, dtype=torch.int32, device=DEVICE)
        self.pool = torch.zeros(LAYERS, skinny.MAX_ROWS // 16, 2, 16, KV, DIM, device=DEVICE, dtype=DTYPE)
        self.angles = torch.randn(skinny.MAX_ROWS, DIM // 2, device=DEVICE)

    def run(self, rows: AdaptedRows) -> torch.Tensor:
        """A pass through all layers."""
        m, adapters = len(rows.x), skinny.adapters_of(rows.slots) if rows.updated else None

        def added(layer: int, name: str, x: torch.Tensor) -> skinny.Updates | None:
            if adapters is None or name not in rows.updated:
                return None
            return adapters.updates(x, self.sites[layer][name])

        x, sums = rows.x, torch.ones(1, skinny.MAX_ROWS, device=DEVICE)
        for layer, weights in enumerate(self.weights):
            if m > skinny.MAX_ROWS:
                for name, read in (("qkv", x), ("o", x), ("gated", x), ("down", x.new_zeros(m, INNER))):
                    made = read @ weights[name].t()
                    if (behind := added(layer, name, read)) is not None:
                        behind.add_to(made, CUDA)
                continue
            q = skinny.empty_padded(m, HEADS, DIM, like=x)
            rotation = skinny.RotaryInput(self.angles, self.angles, self.places[:m])
            qkv = skinny.QkvWeights(weights["qkv"], updates=added(layer, "qkv", x))
            kv = skinny.KvRows(self.pool[layer], self.places[:m])
            skinny.qkv_rope(skinny.SkinnyInput(x, sums, EPS), qkv, q, rotation, kv, self.launch)
            read = q.view(m, -1)
            x, sums = self._back(read, weights["o"], x, added(layer, "o", read))
            inner, behind = skinny.empty_padded(m, INNER, like=x), added(layer, "gated", x)
            skinny.gated(
                skinny.SkinnyInput(x, sums, EPS), weights["gated"], inner, self.launch, updates=behind
            )
            x, sums = self._back(inner, weights["down"], x, added(layer, "down", inner))
        return x

    def _back(
        self, read: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, added: skinny.Updates | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        source, out = skinny.SkinnyInput(read), skinny.empty_padded(*residual.shape, like=read)
        parts = skinny.linear_parts(source, weight, self.launch)
        sums = out.new_empty(parts, skinny.MAX_ROWS, dtype=torch.float32)
        skinny.linear(source, weight, out, self.launch, skinny.LinearEnd(residual, sums, updates=added))
        return out, sums


def _parts(name: str) -> torch.Tensor:
    n, _, parts = SHAPES[name]
    sizes = [HEADS * DIM, KV * DIM, KV * DIM] if name == "qkv" else [n // parts] * parts
    return torch.arange(parts, dtype=torch.int32).repeat_interleave(torch.tensor(sizes))


def rows_of(count: int, adapters: int, updated: Sequence[str]) -> AdaptedRows:
    """Rows of as many adapters in turn; 0: none has one."""
    slots = [1 + row % adapters if adapters else 0 for row in range(count)]
    x = torch.randn(count, HIDDEN, device=DEVICE, dtype=DTYPE)
    return AdaptedRows(x, torch.tensor(slots, dtype=torch.int32, device=DEVICE), updated)


def pass_us(products: Products, rows: AdaptedRows) -> float:
    """Of a layer; 0 on a CPU, where it is run once."""
    if not CUDA:
        products.run(rows)
        return 0.0
    return graph_us([lambda: products.run(rows)]) / LAYERS


def start_times(products: Products, rows: AdaptedRows) -> None:
    """Prints when the kernels of a layer in the middle begin and end, us from the first on."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products.run(rows)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize()
    events = [each for each in seen.events() if str(each.device_type).endswith("CUDA")]
    found = sorted((each.time_range.start, each.time_range.end, each.name) for each in events)
    middle = found[len(found) // 2 :][:10]
    for begin, end, name in middle:
        print(f"  {begin - middle[0][0]:8.2f} to {end - middle[0][0]:8.2f}  {name[:60]}", flush=True)


@torch.inference_mode()
def main() -> None:
    """A line for each number of rows and of adapters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 192])
    parser.add_argument("--start-times", action="store_true")
    options = parser.parse_args()
    products, every = Products(), tuple(SHAPES)
    for count in options.rows:
        plain = pass_us(products, rows_of(count, 0, ()))
        for adapters in (each for each in (0, 1, 8, 32) if each <= min(count, SLOTS)):
            line: dict[str, object] = {"rows": count, "adapters": adapters, "plain_us": round(plain, 1)}
            for updated in (every, *((name,) for name in every)):
                took = pass_us(products, rows_of(count, adapters, updated)) - plain
                line["each" if updated == every else updated[0]] = round(took / len(updated), 2)
            print(json.dumps(line), flush=True)
            if options.start_times and CUDA:
                start_times(products, rows_of(count, adapters, every))


if __name__ == "__main__":
    main()
